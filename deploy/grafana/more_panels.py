"""The dashboards of reward, trainer, weights and cluster; the others and the notation are in `panels.py`."""

from __future__ import annotations

from panels import (
    BUFFER,
    OVERVIEW,
    ROLLOUT,
    Board,
    Panel,
    Row,
    busy,
    increase,
    per_second,
    quantiles,
    share,
)

REWARD = Board(
    "areal-reward",
    "areal-async / Reward",
    "Verdicts, how long they take, and the servers and judges that give them.",
    (
        Row(
            "Verdicts",
            (
                Panel(
                    "Verdicts a second",
                    "By reward and kind: an error or a timeout is no score.",
                    {"{{reward}} {{kind}}": per_second("areal_reward_verdicts_total", "job, reward, kind")},
                    kind="stacked",
                    low=0,
                ),
                share(
                    "Verdicts without a score",
                    "Share of errors and timeouts over five minutes.",
                    {"{{reward}}": "job_reward:areal_reward_lost:ratio5m{<job>}"},
                ),
                Panel(
                    "Errors a second",
                    "By kind of error.",
                    {"{{reward}} {{error}}": per_second("areal_reward_errors_total", "job, reward, error")},
                    low=0,
                ),
                Panel(
                    "Scores",
                    "Quartiles of the scores given.",
                    {
                        f"{q} {{{{reward}}}}": f"histogram_quantile({q}, sum by (job, reward, le) "
                        "(rate(areal_reward_score_bucket{<job>}[<rate>])))"
                        for q in (0.25, 0.5, 0.75)
                    },
                ),
                Panel(
                    "Seconds of a call",
                    "Median, 0.95 and 0.99 of one call by itself, without its wait for a process.",
                    quantiles("areal_reward_call_seconds", "reward"),
                    "s",
                    low=0,
                ),
                Panel(
                    "Age of the oldest call",
                    "Since the oldest call without verdicts was claimed.",
                    {"{{reward}}": "areal_reward_queue_age_seconds{<job>}"},
                    "s",
                    low=0,
                ),
            ),
        ),
        Row(
            "Scoring processes",
            (
                Panel(
                    "Processes and calls",
                    "Processes ready, and with a call; calls that wait; episodes without their verdict.",
                    {
                        "ready": "areal_reward_workers_alive{<job>}",
                        "with a call": "areal_reward_workers_busy{<job>}",
                        "calls waiting": "areal_reward_queued_calls{<job>}",
                        "episodes pending": "areal_reward_pending_episodes{<job>}",
                    },
                    low=0,
                ),
                share(
                    "Busy share",
                    "Share of time in which at least one call ran.",
                    {"{{process}}": busy("score")},
                ),
                Panel(
                    "Trouble",
                    "Processes renewed for their memory, verdicts that came too late, calls never answered.",
                    {
                        "renewed": increase("areal_reward_workers_renewed_total"),
                        "refused": increase("areal_reward_verdicts_refused_total"),
                        "overdue {{reward}}": increase("areal_reward_overdue_calls_total"),
                        "sandbox {{sandbox}} {{reward}}": increase("areal_reward_sandboxed_verdicts_total"),
                    },
                    low=0,
                ),
            ),
        ),
        Row(
            "Reward servers and judges",
            (
                Panel(
                    "Servers ready",
                    "1 while a server can be used.",
                    {"{{server}}": "areal_reward_remote_ready{<job>}"},
                    low=0,
                    width=6,
                ),
                Panel(
                    "Requests to servers, a second",
                    "By how they ended; calls sent again, by cause.",
                    {
                        "{{server}} {{outcome}}": per_second(
                            "areal_reward_remote_requests_total", "job, server, outcome"
                        ),
                        "again: {{cause}}": per_second(
                            "areal_reward_remote_resent_calls_total", "job, cause"
                        ),
                    },
                    low=0,
                    width=6,
                ),
                Panel(
                    "Seconds of a request",
                    "From sending a request to a reward server to its answer.",
                    quantiles("areal_reward_remote_request_seconds", "server"),
                    "s",
                    low=0,
                    width=6,
                ),
                Panel(
                    "Requests to judges, a second",
                    "By how they ended.",
                    {"{{outcome}}": per_second("areal_reward_judge_requests_total", "job, outcome")},
                    low=0,
                    width=6,
                ),
            ),
        ),
    ),
)

TRAINER = Board(
    "areal-trainer",
    "areal-async / Trainer",
    "Where the time of a step goes, and whether the updates are sound.",
    (
        Row(
            "Time",
            (
                Panel(
                    "Phases of a step",
                    "Share of time in each phase of the trainer's loop.",
                    {
                        "{{phase}} {{policy}}": "sum by (job, policy, phase) "
                        "(rate(areal_trainer_phase_seconds_total{<policy>}[<rate>]))"
                    },
                    "percentunit",
                    kind="stacked",
                    low=0,
                ),
                Panel(
                    "Activities",
                    "Share of time in which the process trains, publishes, writes checkpoints, exports.",
                    {
                        "{{activity}} {{process}}": "rate(areal_busy_seconds_total"
                        '{<job>, service="trainer"}[<rate>])'
                    },
                    "percentunit",
                    kind="stacked",
                    low=0,
                ),
                share(
                    "MFU",
                    "Model FLOPs utilisation, where the device's peak is known.",
                    {"{{policy}}": "areal_trainer_mfu{<policy>}"},
                ),
                Panel(
                    "Tokens trained a second",
                    "Tokens that a policy sampled: over time, and in the last step alone.",
                    {
                        "rate {{policy}}": "rate(areal_trainer_tokens_total{<policy>}[<rate>])",
                        "last step {{policy}}": "areal_trainer_tokens_per_second{<policy>}",
                    },
                    low=0,
                ),
                Panel(
                    "Steps an hour",
                    "At the pace of the last five minutes.",
                    {"{{policy}}": "job_policy:areal_trainer_steps:per_hour{<policy>}"},
                    low=0,
                ),
                Panel(
                    "Step and version",
                    "Steps finished, those that the buffer knows of, and the newest weights published.",
                    {
                        "step {{policy}}": "areal_trainer_step{<policy>}",
                        "buffer {{policy}}": "areal_buffer_version{<policy>}",
                        "version {{policy}}": "areal_trainer_version{<policy>}",
                    },
                    "none",
                ),
            ),
        ),
        Row(
            "Updates",
            (
                Panel("Loss", "Of the last step.", {"{{policy}}": "areal_trainer_loss{<policy>}"}),
                Panel(
                    "Gradient norm",
                    "Before clipping; and how many updates were left out as not finite.",
                    {
                        "norm {{policy}}": "areal_trainer_grad_norm{<policy>}",
                        "not finite {{policy}}": "areal_trainer_non_finite_total{<policy>}",
                    },
                    low=0,
                ),
                Panel(
                    "Learning rate", "Of the last step.", {"{{policy}}": "areal_trainer_lr{<policy>}"}, "sci"
                ),
                Panel("Entropy", "Nats per unit.", {"{{policy}}": "areal_trainer_entropy{<policy>}"}),
                Panel(
                    "KL to the reference",
                    "Nats per unit, where there is a reference.",
                    {"{{policy}}": "areal_trainer_kl{<policy>}"},
                ),
                share(
                    "Units clipped",
                    "Share of the units whose ratio was clipped.",
                    {"{{policy}}": "areal_trainer_clip_ratio{<policy>}"},
                ),
            ),
        ),
        Row(
            "Samples",
            (
                Panel(
                    "Response length",
                    "Mean and largest of a step, in tokens, and the mean of its prompts.",
                    {
                        "{{statistic}} {{policy}}": "areal_trainer_response_length{<policy>}",
                        "prompt {{policy}}": "areal_trainer_prompt_length_mean{<policy>}",
                    },
                    low=0,
                ),
                Panel(
                    "Reward and its components",
                    "Means over the episodes of a step.",
                    {
                        "reward {{policy}}": "areal_trainer_reward_mean{<policy>}",
                        "{{component}} {{policy}}": "areal_trainer_reward_component{<policy>}",
                    },
                ),
                share(
                    "Effective sample share",
                    "What the units of a step count for once their weights are taken into account.",
                    {"{{policy}}": "areal_trainer_effective_sample_share{<policy>}"},
                ),
                Panel(
                    "Staleness",
                    "Of a step's episodes in versions, beside the bound.",
                    {
                        "mean {{policy}}": "areal_trainer_staleness_mean{<policy>}",
                        "max {{policy}}": "areal_trainer_staleness_max{<policy>}",
                        "bound {{policy}}": "areal_buffer_staleness_bound{<policy>}",
                    },
                    low=0,
                ),
                Panel(
                    "By staleness",
                    "What the loss and the correction did with the units of each staleness.",
                    {"{{figure}} at {{staleness}} {{policy}}": "areal_trainer_by_staleness{<policy>}"},
                ),
                Panel(
                    "Self-check",
                    "Largest difference between the engine's and the trainer's log-prob of a unit, in nats.",
                    {"version {{version}} {{policy}}": "areal_trainer_self_check_max_nats{<policy>}"},
                    low=0,
                ),
                Panel(
                    "Held-out figures",
                    "By data source.",
                    {"{{data_source}} {{statistic}} {{policy}}": "areal_evaluation_score{<policy>}"},
                    width=12,
                ),
                Panel(
                    "Held-out samples without a score",
                    "By data source; they count as nothing.",
                    {"{{data_source}} {{policy}}": "areal_evaluation_unscored_samples{<policy>}"},
                    low=0,
                    width=12,
                ),
            ),
        ),
    ),
)

WEIGHTS = Board(
    "areal-weights",
    "areal-async / Weights",
    "How new weights reach the workers, and what that costs generation.",
    (
        Row(
            "Versions",
            (
                Panel(
                    "Versions",
                    "Published, sampled with by each worker, and evaluated.",
                    {
                        "published {{policy}}": "areal_trainer_version{<policy>}",
                        "{{process}} {{policy}}": "areal_rollout_version{<policy>}",
                        "evaluated {{policy}}": "areal_evaluation_version{<policy>}",
                    },
                    "none",
                ),
                Panel(
                    "Version lag",
                    "Versions between what is published and what a worker samples with.",
                    {"{{process}} {{policy}}": "job_policy_process:areal_version_lag:versions{<policy>}"},
                    low=0,
                ),
                Panel(
                    "Updates",
                    "Snapshots offered to workers, by what became of them.",
                    {
                        "{{outcome}} {{process}}": increase(
                            "areal_rollout_updates_total", "job, process, outcome"
                        )
                    },
                    low=0,
                ),
            ),
        ),
        Row(
            "On the way",
            (
                Panel(
                    "Bytes a second",
                    "Sent by the publisher or a peer, and received, by channel.",
                    {
                        "sent by {{source}} ({{channel}})": per_second(
                            "areal_weights_sent_bytes_total", "job, source, channel"
                        ),
                        "received from {{source}} ({{channel}})": per_second(
                            "areal_weights_received_bytes_total", "job, source, channel"
                        ),
                    },
                    "Bps",
                    low=0,
                ),
                Panel(
                    "Seconds of a fetch",
                    "From the first wish for a chunk to a complete directory.",
                    quantiles("areal_weights_fetch_seconds"),
                    "s",
                    low=0,
                ),
                Panel(
                    "Generation held up",
                    "Seconds in which an update kept an engine from sampling.",
                    quantiles("areal_rollout_update_stall_seconds"),
                    "s",
                    low=0,
                ),
                Panel(
                    "Time lost to updates",
                    "Share of a worker's time in which an update kept it from sampling.",
                    {"{{process}}": "rate(areal_rollout_update_stall_seconds_sum{<job>}[<rate>])"},
                    "percentunit",
                    low=0,
                ),
                Panel(
                    "Waits",
                    "1 while a snapshot is on its way and nothing comes, with what it waits for.",
                    {"{{process}}: {{what}}": "areal_weights_waits{<job>}"},
                    low=0,
                ),
                Panel(
                    "Chunks refused",
                    "With another hash, or from a source that was left for another.",
                    {"{{reason}} {{process}}": increase("areal_weights_chunks_refused_total")},
                    low=0,
                ),
            ),
        ),
    ),
)

CLUSTER = Board(
    "areal-cluster",
    "areal-async / Cluster",
    "Jobs, processes and hosts, and what dies.",
    (
        Row(
            "Processes",
            (
                Panel(
                    "Answer",
                    "1 for a process that answers its scrape.",
                    {"{{process}} on {{host}}": 'up{<job>, service!=""}'},
                    low=0,
                    high=1,
                ),
                Panel(
                    "Started again",
                    "Processes that died and were started again in 15 minutes.",
                    {
                        "{{died}}": "sum by (job, died) "
                        "(increase(areal_supervisor_restarts_total{<job>}[15m]))"
                    },
                    low=0,
                ),
                Panel(
                    "Stalls",
                    "Since the trainer last computed, by the edge that starves.",
                    {"{{edge}}": "areal_stall_seconds{<job>}"},
                    "s",
                    low=0,
                ),
                share(
                    "Busy share",
                    "Of each process, by activity.",
                    {"{{process}} {{activity}}": "rate(areal_busy_seconds_total{<job>}[<rate>])"},
                ),
                Panel(
                    "Requests refused",
                    "By the processes of a run: strangers, and what the asker's role may not.",
                    {
                        "{{reason}} {{process}}": increase("areal_rpc_refused_total"),
                    },
                    low=0,
                ),
                Panel(
                    "Memory of processes",
                    "Resident bytes.",
                    {"{{process}}": "process_resident_memory_bytes{<job>}"},
                    "bytes",
                    low=0,
                ),
            ),
        ),
        Row(
            "Disk",
            (
                Panel(
                    "Room on the run folder's disk",
                    "Free, and its size.",
                    {
                        "free": "areal_run_disk_free_bytes{<job>}",
                        "size": "areal_run_disk_size_bytes{<job>}",
                    },
                    "bytes",
                    low=0,
                    width=12,
                ),
                share(
                    "Free",
                    "Share of the run folder's disk.",
                    {"": "job:areal_run_disk_free:ratio{<job>}"},
                    width=12,
                ),
            ),
        ),
        Row(
            "Controller",
            (
                Panel("Jobs", "By state.", {"{{state}}": "areal_controller_jobs"}, kind="stacked", low=0),
                Panel(
                    "Requests refused",
                    "For their token, its right, or the request.",
                    {"{{reason}}": "rate(areal_controller_refused_total[<rate>])"},
                    low=0,
                ),
                Panel(
                    "Failures",
                    "Looks at the jobs that an error of the controller's own or of its disk broke off.",
                    {"failures": "increase(areal_controller_failures_total[<rate>])"},
                    low=0,
                ),
            ),
        ),
    ),
)

BOARDS = (OVERVIEW, ROLLOUT, BUFFER, REWARD, TRAINER, WEIGHTS, CLUSTER)
