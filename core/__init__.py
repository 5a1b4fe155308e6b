"""All that a plugin author imports. Imports no torch."""

import pluggy

from core.errors import (
    ChannelClosed,
    CheckpointError,
    ConfigError,
    CoreError,
    DamagedFile,
    PlanError,
    PluginError,
    StageError,
    TrustError,
)
from core.hookspecs import API_VERSION, PROJECT
from core.interfaces.architecture import (
    Architecture,
    Batch,
    BatchSegment,
    CacheSize,
    EmbedAndHead,
    LayerStack,
    ModelSpec,
    PiecewiseLayer,
    PiecewiseStack,
    SessionState,
    TensorSpec,
    Weights,
)
from core.interfaces.checkpoint import Checkpoint, CheckpointFormat, FileInfo, Progress, Source, TensorInfo
from core.interfaces.dtypes import DType, KVDType
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
from core.interfaces.transport import MIN_MESSAGE_BYTES, Channel, Credentials, Handler, Transport

__version__ = "0.1.0"

hookimpl = pluggy.HookimplMarker(PROJECT)

__all__ = [
    "API_VERSION",
    "CHUNK_ROWS",
    "COORDINATOR",
    "Architecture",
    "Batch",
    "BatchSegment",
    "CacheSize",
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
    "KVDType",
    "DamagedFile",
    "EmbedAndHead",
    "Embedding",
    "FileInfo",
    "GroupedLinear",
    "Handler",
    "LayerStack",
    "Linear",
    "MIN_MESSAGE_BYTES",
    "ModelSpec",
    "PiecewiseLayer",
    "PiecewiseStack",
    "Plan",
    "PlanError",
    "PlanFor",
    "PlanRequest",
    "Planner",
    "PluginError",
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
