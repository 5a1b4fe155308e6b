"""The planner `balanced`: as few nodes as hold the model, each filled in proportion to its memory."""

from core import Planner, hookimpl


@hookimpl
def core_planners() -> list[type[Planner]]:
    from core_plugin_planner.balanced import BalancedPlanner

    return [BalancedPlanner]
