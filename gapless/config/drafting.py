"""Who drafts, how many tokens a step verifies, and how its drafts branch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gapless.config.checks import check_at_least_1, check_left_out
from gapless.config.options import choose
from gapless.core.draft_shape import TreeShape, draft_reach
from gapless.errors import ConfigError

if TYPE_CHECKING:
    from gapless.config.options import EngineOptions
    from gapless.core.architecture import Architecture

logger = logging.getLogger(__name__)

# tokens drafted per step where nothing else is asked for, and at most
DEFAULT_DRAFTS = 3
MOST_DRAFTS = 15
# tokens that a step verifies, at most and in a tree where nothing else is asked for
MOST_NODES = 1 + MOST_DRAFTS
DEFAULT_NODES = 8
# drafts that the passes of a step may go on from together: a bit of an integer for each
MOST_BEAM_NODES = 63
WINDOW_OPTIONS = (
    "speculative_simulate_acceptance", "speculative_topk", "speculative_num_draft_tokens",
)  # fmt: skip


def resolve_drafting(
    options: EngineOptions, architecture: Architecture, *, has_mtp_weights: bool
) -> tuple[str, int, TreeShape | None]:
    """Decide the drafter, how many tokens a step verifies, and how its drafts branch.

    Raises:
        ConfigError: an option is out of range, has no effect, or wants what the checkpoint lacks.
    """
    asked, num_steps = options.speculative_algorithm, options.speculative_num_steps
    check_drafting(options)
    drafter: str = asked
    if asked == "auto":
        drafter = "mtp" if has_mtp_weights and num_steps != 0 else "none"
        found = "has" if has_mtp_weights else "has no"
        logger.info("speculative_algorithm = %s (the checkpoint %s MTP weights)", drafter, found)
    if drafter == "mtp" and not has_mtp_weights:
        raise ConfigError(
            f"speculative_algorithm=mtp: this checkpoint of {architecture.model_type} has no MTP "
            "weights (mtp.fc.weight, mtp.norm.weight, mtp.layers.0.*); use "
            "speculative_algorithm=ngram, or a checkpoint that has them"
        )
    if drafter == "mtp" and architecture.num_mtp_layers != 1:
        raise ConfigError(
            f"speculative_algorithm=mtp: the model has {architecture.num_mtp_layers} MTP layers, "
            "one is supported; use speculative_algorithm=ngram or none"
        )
    if drafter == "none":
        if num_steps:
            raise ConfigError(
                f"speculative_num_steps={num_steps} has no effect without a drafter; use "
                "speculative_algorithm=ngram, or leave it out"
            )
        return drafter, *window_shape(options, 0, drafter)
    num_steps = choose("speculative_num_steps", num_steps, DEFAULT_DRAFTS)
    return drafter, *window_shape(options, num_steps, drafter)


def window_shape(
    options: EngineOptions, num_steps: int, drafter: str
) -> tuple[int, TreeShape | None]:
    """Decide how many tokens a step verifies, and how its drafts branch.

    Raises:
        ConfigError: the options contradict each other, or have no effect on this drafter.
    """
    if drafter == "none":
        check_left_out(options, WINDOW_OPTIONS, "without a drafter")
        return 1, None
    topk, asked = options.speculative_topk, options.speculative_num_draft_tokens
    if topk > 1 and drafter != "mtp":
        raise ConfigError(
            f"speculative_topk={topk}: speculative_algorithm={drafter} drafts chains only; use "
            "speculative_algorithm=mtp, or leave it out"
        )
    if topk == 1:
        if asked not in (None, num_steps + 1):
            raise ConfigError(
                f"speculative_num_draft_tokens={asked}: a chain of speculative_num_steps="
                f"{num_steps} has {num_steps + 1}, the newest token among them; leave it out, or "
                "set speculative_topk above 1 for a tree"
            )
        return num_steps + 1, None
    tree = TreeShape(num_steps, topk)
    # fewer nodes than the deepest path has would leave the last passes without effect, and fewer
    # than the root and its children would leave some of these
    least = 1 + max(num_steps, topk)
    most = min(MOST_NODES, 1 + tree.num_candidates)
    if least > most:
        raise ConfigError(
            f"speculative_topk={topk}: want at most {MOST_NODES - 1} drafts after a token; lower it"
        )
    if draft_reach(MOST_NODES, tree) > MOST_BEAM_NODES:
        raise ConfigError(
            f"speculative_topk={topk} with speculative_num_steps={num_steps} goes on from "
            f"{draft_reach(MOST_NODES, tree)} drafts; want at most {MOST_BEAM_NODES}: lower one"
        )
    default = min(max(DEFAULT_NODES, least), most)
    num_nodes = choose("speculative_num_draft_tokens", asked, default)
    if not least <= num_nodes <= most:
        raise ConfigError(
            f"speculative_num_draft_tokens={num_nodes}: with speculative_topk={topk} and "
            f"speculative_num_steps={num_steps} want {least} to {most}, the newest token among them"
        )
    return num_nodes, tree


def check_drafting(options: EngineOptions) -> None:
    """Check options of speculation by themselves, whatever the model.

    Raises:
        ConfigError: one is out of range, or they contradict each other.
    """
    asked, num_steps = options.speculative_algorithm, options.speculative_num_steps
    if num_steps is not None and (
        isinstance(num_steps, bool)
        or not isinstance(num_steps, int)
        or not 0 <= num_steps <= MOST_DRAFTS
    ):
        raise ConfigError(f"speculative_num_steps={num_steps!r}: want 0 to {MOST_DRAFTS}")
    if asked in ("mtp", "ngram") and num_steps == 0:
        raise ConfigError(
            f"speculative_algorithm={asked} drafts nothing with speculative_num_steps=0; leave out "
            "the one or the other"
        )
    _check_tree_ranges(options)
    wanted = options.speculative_simulate_acceptance
    if wanted is None:
        return
    if options.speculative_topk > 1:
        raise ConfigError(
            "speculative_simulate_acceptance: a tree has no path that is sure to be as long as "
            "pretended; leave out speculative_topk"
        )
    if options.load_format != "dummy":
        raise ConfigError(
            "speculative_simulate_acceptance changes the tokens: it is for benchmarks with "
            "load_format=dummy only"
        )
    most = 1 + (DEFAULT_DRAFTS if num_steps is None else num_steps)
    if not isinstance(wanted, (int, float)) or not 1 <= wanted <= most:
        raise ConfigError(
            f"speculative_simulate_acceptance={wanted!r}: want 1 to {most} tokens per step"
        )


def _check_tree_ranges(options: EngineOptions) -> None:
    topk, num_nodes = options.speculative_topk, options.speculative_num_draft_tokens
    check_at_least_1("speculative_topk", topk)
    if num_nodes is None:
        return
    check_at_least_1("speculative_num_draft_tokens", num_nodes)
    if not 2 <= num_nodes <= MOST_NODES:
        raise ConfigError(
            f"speculative_num_draft_tokens={num_nodes}: want 2 to {MOST_NODES}, the newest token "
            "among them"
        )
