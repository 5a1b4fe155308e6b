"""The planners: `measured` makes a token take the least time; `balanced` uses as few nodes as hold the model."""

from core import Planner, hookimpl


@hookimpl
def core_planners() -> list[type[Planner]]:
    from core_plugin_planner.balanced import BalancedPlanner
    from core_plugin_planner.measured import MeasuredPlanner

    return [BalancedPlanner, MeasuredPlanner]
