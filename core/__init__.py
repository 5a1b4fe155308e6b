"""All that a plugin author imports. Imports no torch."""

import pluggy

from core.errors import ChannelClosed, CheckpointError, ConfigError, CoreError, PlanError, StageError, TrustError
from core.hookspecs import PROJECT
from core.interfaces.architecture import (
    Architecture,
    Batch,
    BatchSegment,
    EmbedAndHead,
    LayerStack,
    ModelSpec,
    SessionState,
    TensorSpec,
    Weights,
)
from core.interfaces.checkpoint import Checkpoint, CheckpointFormat, FileInfo, Progress, Source, TensorInfo
from core.interfaces.dtypes import DType
from core.interfaces.planner import (
    CHUNK_ROWS,
    COORDINATOR,
    Candidate,
    Plan,
    PlanFor,
    Planner,
    PlanRequest,
    StagePlan,
    Wire,
)
from core.interfaces.quantizer import Embedding, GroupedLinear, Linear, Quantizer
from core.interfaces.stored import StoredForm, StoredWeight, Values
from core.interfaces.transport import Channel, Credentials, Handler, Transport

__version__ = "0.1.0"
API_VERSION = 1
"""Raised when a hook or an interface changes in a way that plugins notice."""

hookimpl = pluggy.HookimplMarker(PROJECT)

__all__ = [
    "API_VERSION",
    "CHUNK_ROWS",
    "COORDINATOR",
    "Architecture",
    "Batch",
    "BatchSegment",
    "Candidate",
    "Channel",
    "ChannelClosed",
    "Checkpoint",
    "CheckpointError",
    "CheckpointFormat",
    "ConfigError",
    "CoreError",
    "Credentials",
    "DType",
    "EmbedAndHead",
    "Embedding",
    "FileInfo",
    "GroupedLinear",
    "Handler",
    "LayerStack",
    "Linear",
    "ModelSpec",
    "Plan",
    "PlanError",
    "PlanFor",
    "PlanRequest",
    "Planner",
    "Progress",
    "Quantizer",
    "SessionState",
    "Source",
    "StageError",
    "StagePlan",
    "StoredForm",
    "StoredWeight",
    "TensorInfo",
    "TensorSpec",
    "Transport",
    "TrustError",
    "Values",
    "Weights",
    "Wire",
    "hookimpl",
]
