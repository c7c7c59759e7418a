"""What the dashboards show: their rows, panels and queries, as plain data that `build.py` makes JSON of.

In an expression `<job>` stands for the matchers of a series of any process, `<policy>` for those of one that
has the label `policy` too, and `<rate>` for the span that Grafana finds right for the resolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["lines", "stacked", "stat", "bars"]


@dataclass(frozen=True)
class Panel:
    """`queries` are expressions by legend, to which the job is added; `unit` is one of Grafana's."""

    title: str
    help: str
    queries: dict[str, str]
    unit: str = "short"
    kind: Kind = "lines"
    width: int = 8
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    """One dashboard. `uid` is part of its address and of the name of its file."""

    uid: str
    title: str
    help: str
    rows: tuple[Row, ...]


def share(title: str, help: str, queries: dict[str, str], kind: Kind = "lines", width: int = 8) -> Panel:
    return Panel(title, help, queries, "percentunit", kind, width, low=0, high=1)


def per_second(series: str, by: str) -> str:
    return f"sum by ({by}) (rate({series}{{<job>}}[<rate>]))"


def increase(series: str, by: str = "") -> str:
    grown = f"increase({series}{{<job>}}[<rate>])"
    return f"sum by ({by}) ({grown})" if by else grown


def busy(activity: str) -> str:
    """The share of time in which a process is at an activity, or at one of several (`a|b`)."""
    return (
        "clamp_max(sum by (job, process, service) "
        f'(rate(areal_busy_seconds_total{{<job>, activity=~"{activity}"}}[<rate>])), 1)'
    )


def quantiles(series: str, by: str = "job") -> dict[str, str]:
    """Median, 0.95 and 0.99 of a histogram of seconds."""
    told = "" if by == "job" else f" {{{{{by}}}}}"
    labels = ", ".join(dict.fromkeys(["job", by, "le"]))
    return {
        f"{q}{told}": f"histogram_quantile({q}, sum by ({labels}) (rate({series}_bucket{{<job>}}[<rate>])))"
        for q in (0.5, 0.95, 0.99)
    }


OVERVIEW = Board(
    "areal-overview",
    "areal-async / Overview",
    "Whether the job learns, how fast it goes, and who is the bottleneck.",
    (
        Row(
            "Now",
            (
                Panel(
                    "Tokens sampled a second",
                    "Over all rollout workers, in the last minute.",
                    {"": "job:areal_rollout_tokens:rate1m{<job>}"},
                    kind="stat",
                    width=4,
                ),
                Panel(
                    "Steps an hour",
                    "At the pace of the last five minutes.",
                    {"{{policy}}": "job_policy:areal_trainer_steps:per_hour{<policy>}"},
                    kind="stat",
                    width=4,
                ),
                Panel(
                    "Step",
                    "Steps finished.",
                    {"{{policy}}": "areal_trainer_step{<policy>}"},
                    "none",
                    kind="stat",
                    width=4,
                ),
                Panel(
                    "Held-out accuracy",
                    "Of the last evaluation.",
                    {"{{policy}}": "areal_evaluation_accuracy{<policy>}"},
                    "percentunit",
                    kind="stat",
                    width=4,
                ),
                Panel(
                    "Staleness / bound",
                    "Mean staleness of the last step as a share of buffer.max_staleness.",
                    {"{{policy}}": "job_policy:areal_staleness_of_bound:ratio{<policy>}"},
                    "percentunit",
                    kind="stat",
                    width=4,
                ),
                Panel(
                    "Stall",
                    "Since the trainer last computed; 0 while it does.",
                    {"{{edge}}": "max by (job, edge) (areal_stall_seconds{<job>})"},
                    "s",
                    kind="stat",
                    width=4,
                ),
            ),
        ),
        Row(
            "Learning",
            (
                Panel(
                    "Reward",
                    "Mean reward of the episodes of a step.",
                    {"{{policy}}": "areal_trainer_reward_mean{<policy>}"},
                ),
                share(
                    "Held-out accuracy",
                    "Mean, best and majority over the samples of a held-out task.",
                    {"{{statistic}} {{policy}}": 'areal_evaluation_score{<policy>, data_source="*"}'},
                ),
                Panel(
                    "Staleness",
                    "Mean and largest of a step in versions, beside the bound.",
                    {
                        "mean {{policy}}": "areal_trainer_staleness_mean{<policy>}",
                        "max {{policy}}": "areal_trainer_staleness_max{<policy>}",
                        "bound {{policy}}": "areal_buffer_staleness_bound{<policy>}",
                    },
                    low=0,
                ),
            ),
        ),
        Row(
            "Speed, and who is the bottleneck",
            (
                Panel(
                    "Tokens a second",
                    "Sampled by all workers, and trained.",
                    {
                        "sampled": "job:areal_rollout_tokens:rate1m{<job>}",
                        "trained {{policy}}": "job_policy:areal_trainer_tokens:rate1m{<policy>}",
                    },
                    low=0,
                ),
                share(
                    "Busy share of each service",
                    "The service that is busy all the time is the bottleneck; the others wait for it.",
                    {"{{service}}": "job_service:areal_busy_share:rate1m{<job>}"},
                ),
                share(
                    "Bottleneck",
                    "The busiest services now; the first is the one to speed up.",
                    {"{{service}}": "sort_desc(job_service:areal_busy_share:rate1m{<job>})"},
                    kind="bars",
                ),
                share(
                    "The trainer waits",
                    "Share of time in which the trainer neither trains nor publishes.",
                    {"{{process}}": "1 - " + busy("train|publish|checkpoint")},
                ),
                share(
                    "Workers wait",
                    "Share of time in which a worker's engine computes nothing.",
                    {"{{process}}": "1 - " + busy("rollout")},
                ),
                Panel(
                    "Steps an hour",
                    "At the pace of the last five minutes.",
                    {"{{policy}}": "job_policy:areal_trainer_steps:per_hour{<policy>}"},
                    low=0,
                ),
            ),
        ),
    ),
)

ROLLOUT = Board(
    "areal-rollout",
    "areal-async / Rollout",
    "What the workers sample, how full their engines are, and what is lost.",
    (
        Row(
            "Sampling",
            (
                Panel(
                    "Tokens a second",
                    "By worker.",
                    {"{{process}}": per_second("areal_rollout_tokens_total", "job, process")},
                    kind="stacked",
                    low=0,
                ),
                Panel(
                    "Episodes a second",
                    "Acknowledged by the buffer, by worker.",
                    {"{{process}}": per_second("areal_rollout_episodes_total", "job, process")},
                    kind="stacked",
                    low=0,
                ),
                share(
                    "Busy share",
                    "Share of time in which the engine computes.",
                    {"{{process}}": busy("rollout")},
                ),
            ),
        ),
        Row(
            "Engines",
            (
                Panel(
                    "Requests",
                    "Computed now, not yet begun, and the most episodes at once.",
                    {
                        "active {{process}}": "areal_rollout_active_requests{<job>}",
                        "waiting {{process}}": "areal_rollout_waiting_requests{<job>}",
                        "most episodes {{process}}": "areal_rollout_concurrency_limit{<job>}",
                    },
                    low=0,
                ),
                share(
                    "KV room in use",
                    "Of the fullest engine of a worker. At 1 requests wait or are pushed out.",
                    {"{{process}}": "areal_rollout_kv_used_ratio{<job>}"},
                ),
                share(
                    "Prefix cache",
                    "Share of prompt tokens that a server found in its cache.",
                    {
                        "{{process}}": "sum by (job, process) "
                        "(rate(areal_rollout_cached_tokens_total{<job>}[<rate>])) / (sum by (job, process) "
                        "(rate(areal_rollout_prompt_tokens_total{<job>}[<rate>])) > 0)"
                    },
                ),
                Panel(
                    "Engines that serve",
                    "Of each worker; engines lost and requests run again are beside them.",
                    {
                        "serving {{process}}": "areal_rollout_replicas_serving{<job>}",
                        "lost {{process}}": "areal_rollout_engine_deaths_total{<job>}",
                        "run again {{process}}": "areal_rollout_requests_rerun_total{<job>}",
                        "draining {{process}}": "areal_rollout_draining{<job>}",
                    },
                    low=0,
                ),
                Panel(
                    "Workers",
                    "That answer.",
                    {"answer": 'count by (job) (up{<job>, service="rollout"} == 1)'},
                    low=0,
                ),
                Panel(
                    "Unsent episodes",
                    "Finished, and not yet acknowledged by the buffer.",
                    {"{{process}}": "areal_rollout_unsent_episodes{<job>}"},
                    low=0,
                ),
                Panel(
                    "Memory on a shared device",
                    "In use at the last turn, with the engine awake and asleep (placement.share).",
                    {"{{state}} {{process}}": "areal_rollout_engine_memory_bytes{<job>}"},
                    unit="bytes",
                    width=12,
                    low=0,
                ),
                share(
                    "Switches of a shared device",
                    "Share of time in which the engine released or restored its memory.",
                    {"{{process}}": "rate(areal_rollout_switch_seconds_total{<job>}[<rate>])"},
                    width=12,
                ),
            ),
        ),
        Row(
            "What is lost",
            (
                Panel(
                    "Episodes lost a second",
                    "Failed in the workflow (of them too long), ended early by their answers and trained all "
                    "the same, or refused by the buffer with its reason.",
                    {
                        "failed": per_second("areal_rollout_episodes_failed_total", "job"),
                        "too long": per_second("areal_rollout_episodes_timed_out_total", "job"),
                        "by their answers": per_second("areal_rollout_episodes_at_fault_total", "job"),
                        "refused: {{reason}}": per_second(
                            "areal_rollout_episodes_refused_total", "job, reason"
                        ),
                        "leases lost": per_second("areal_rollout_leases_lost_total", "job"),
                    },
                    low=0,
                    width=6,
                ),
                Panel(
                    "Tool calls a second",
                    "By tool and how they ended.",
                    {
                        "{{tool}} {{outcome}}": per_second(
                            "areal_rollout_tool_calls_total", "job, tool, outcome"
                        ),
                        "template rewrites": per_second("areal_rollout_template_rewrites_total", "job"),
                    },
                    low=0,
                    width=6,
                ),
                Panel(
                    "Calls of agents a second",
                    "At the gateway, by how they ended; sessions open now.",
                    {
                        "{{outcome}}": per_second("areal_gateway_calls_total", "job, outcome"),
                        "roots: {{reason}}": per_second("areal_gateway_roots_total", "job, reason"),
                        "sessions": "sum by (job) (areal_gateway_sessions{<job>})",
                    },
                    low=0,
                    width=6,
                ),
                Panel(
                    "Tokens of agents a second",
                    "Sampled for agents at the gateway, and recorded.",
                    {"": per_second("areal_gateway_tokens_total", "job")},
                    low=0,
                    width=6,
                ),
            ),
        ),
    ),
)

BUFFER = Board(
    "areal-buffer",
    "areal-async / Buffer",
    "What the buffer holds, how far generation is ahead, and its Redis.",
    (
        Row(
            "Groups and episodes",
            (
                Panel(
                    "Groups held",
                    "By state of the ledger.",
                    {"{{state}}": "areal_buffer_groups{<job>}"},
                    kind="stacked",
                    low=0,
                ),
                Panel(
                    "Episodes held",
                    "By state of the ledger.",
                    {"{{state}}": "areal_buffer_episodes{<job>}"},
                    kind="stacked",
                    low=0,
                ),
                Panel(
                    "Transitions a second",
                    "What happened to groups and episodes, and refusals, by reason.",
                    {"{{reason}}": per_second("areal_buffer_transitions_total", "job, reason")},
                    low=0,
                ),
            ),
        ),
        Row(
            "How far ahead",
            (
                Panel(
                    "Outstanding groups",
                    "Leased and not yet trained; the most that the bound allows; what pacing asks for.",
                    {
                        "outstanding {{policy}}": "areal_buffer_outstanding_groups{<policy>}",
                        "most {{policy}}": "areal_buffer_capacity_groups{<policy>}",
                        "ahead {{policy}}": "areal_buffer_ahead_groups{<policy>}",
                    },
                    low=0,
                ),
                Panel(
                    "Largest staleness trained",
                    "Since the start, beside the bound, in versions.",
                    {
                        "seen {{policy}}": "areal_buffer_max_staleness_seen{<policy>}",
                        "bound {{policy}}": "areal_buffer_staleness_bound{<policy>}",
                    },
                    low=0,
                ),
                Panel(
                    "Ends of episodes, a second",
                    "Trained, and dropped.",
                    {
                        "trained {{policy}}": "rate(areal_buffer_episodes_trained_total{<policy>}[<rate>])",
                        "dropped": "rate(areal_buffer_episodes_dropped_total{<job>}[<rate>])",
                    },
                    low=0,
                ),
            ),
        ),
        Row(
            "Room and Redis",
            (
                Panel(
                    "Bytes held",
                    "Episodes, the limit (buffer.max_bytes), and the memory of Redis.",
                    {
                        "episodes": "areal_buffer_payload_bytes{<job>}",
                        "limit": "areal_buffer_limit_bytes{<job>}",
                        "Redis": "areal_buffer_redis_bytes{<job>}",
                    },
                    "bytes",
                    low=0,
                ),
                share(
                    "Full",
                    "Bytes held as a share of the limit.",
                    {"": "job:areal_buffer_full:ratio{<job>}"},
                ),
                Panel(
                    "Age of the oldest group",
                    "Since its state before training began.",
                    {"": "areal_buffer_queue_age_milliseconds{<job>}"},
                    "ms",
                    low=0,
                ),
                Panel(
                    "Redis is waited for",
                    "With the reason in words; and how long no write was confirmed.",
                    {
                        "{{why}}": "areal_buffer_waits_for_redis{<job>}",
                        "unconfirmed s": "areal_buffer_unconfirmed_seconds{<job>}",
                        "lost writes": "areal_buffer_lost_writes_total{<job>}",
                    },
                    low=0,
                    width=12,
                ),
                share(
                    "Busy share",
                    "Share of time in which the buffer's one thread serves requests.",
                    {"{{process}}": busy("serve")},
                    width=12,
                ),
            ),
        ),
    ),
)
