"""Choice of experts from the best groups of them."""

from gapless.ops.group_routing.reference import route_in_groups

__all__ = ["route_in_groups"]
