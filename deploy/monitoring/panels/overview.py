"""The main dashboard: where the time goes, who is the slowest stage, what is full, what goes wrong."""

from board import Row, dashboard, variable
from grafana import (
    BLUE,
    ORANGE,
    RED,
    YELLOW,
    Column,
    Query,
    bands,
    bar_gauge,
    line_over_stack,
    on_the_right,
    stat,
    table,
    timeseries,
)
from queries import events, mean, new_events, of, of_rank_0, or_none, quantile, rate, staged

FIRST_TOKEN = "kvmesh_time_to_first_token_seconds"
PART = "kvmesh_time_to_first_token_part_seconds"
FIRING = of("ALERTS", 'alertstate="firing"')
FAILED = 'code!~"OK|CANCELLED|INVALID_ARGUMENT|NOT_FOUND|RESOURCE_EXHAUSTED"'
QUANTILES = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))

PER_TOKEN = staged(f"{rate('kvmesh_step_seconds_sum')} / ({rate('kvmesh_prefill_tokens_total')} > 0)")
COMPUTING = staged(rate("kvmesh_step_seconds_sum"))
LINK_RATE = staged(f"{rate('kvmesh_kv_sent_bytes_total')} / ({rate('kvmesh_kv_send_seconds_total')} > 0)")
STAGE = "{{pipeline}} rank {{rank}}"

GLANCE = Row(
    "At a glance",
    4,
    [
        (
            4,
            stat(
                "Pipelines that serve",
                "Whole pipelines, as the registry counts them. 0: nothing can be served.",
                "none",
                Query(f"sum({of('kvmesh_pipelines_whole')}) or vector(0)"),
                limits=[(1, "green")],
                base=RED,
            ),
        ),
        (
            4,
            stat(
                "First token, p95",
                "95 of 100 requests had their first token within this time.",
                "s",
                Query(quantile(0.95, FIRST_TOKEN)),
                limits=[(1, YELLOW), (2.5, RED)],
            ),
        ),
        (
            4,
            stat(
                "Slowest stage",
                "The stage that computes longest for each prompt token. It bounds its pipeline; the table below "
                "compares all.",
                "s",
                Query(f"topk(1, {PER_TOKEN})", STAGE),
                base=BLUE,
                named=True,
            ),
        ),
        (
            4,
            stat(
                "Tokens a second",
                "Tokens that decoders produce, all together.",
                "suffix: tok/s",
                Query(f"sum({rate('kvmesh_decode_tokens_total')})"),
                base=BLUE,
                decimals=0,
            ),
        ),
        (
            4,
            stat(
                "Requests failed",
                "Share of requests that ended in an error of the mesh. A client's own doing and refusals "
                "(RESOURCE_EXHAUSTED) are not in it.",
                "percentunit",
                Query(f"sum({rate('kvmesh_requests_total', FAILED)}) / (sum({rate('kvmesh_requests_total')}) > 0)"),
                limits=[(0.01, YELLOW), (0.05, RED)],
            ),
        ),
        (
            4,
            stat(
                "Alerts firing",
                "Of this mesh; the table at the end names them.",
                "none",
                Query(f"count({FIRING}) or vector(0)"),
                limits=[(1, RED)],
            ),
        ),
    ],
)

WHERE_TIME_GOES = Row(
    "Time to the first token",
    9,
    [
        (
            10,
            timeseries(
                "Where the first token's time goes",
                "Mean seconds of each part, stacked; the dashed line is the same time measured as one, and lies on "
                "top of them. assign: the registry gives a room. reserve: the decoder finds pages. queue: at rank 0, "
                "until it is computed. prefill: the stages compute. transfer_tail: KV still on its way after the last "
                "compute. join: the decoder is in a step of its own. other: the gateway itself, and the whole time of "
                "rooms that were lost before.",
                "s",
                Query(
                    f"sum by (part) ({rate(f'{PART}_sum')})"
                    f" / on () group_left () (sum({rate(f'{FIRST_TOKEN}_count')}) > 0)",
                    "{{part}}",
                ),
                Query(mean(FIRST_TOKEN), "measured as one"),
                stack=True,
                overrides=[line_over_stack("measured as one", "text")],
            ),
        ),
        (
            6,
            bar_gauge(
                "Share of each part",
                "Of the time to the first token, over the whole time shown.",
                "percentunit",
                Query(
                    f"sort_desc(sum by (part) (increase({of(f'{PART}_sum')}[$__range]))"
                    f" / on () group_left () (sum(increase({of(f'{FIRST_TOKEN}_sum')}[$__range])) > 0))",
                    "{{part}}",
                ),
            ),
        ),
        (
            8,
            timeseries(
                "Time to the first token",
                "As clients see it, from the arrival of the request. A dot is one request; it names its room, which "
                "the logs name too.",
                "s",
                *(Query(quantile(q, FIRST_TOKEN), name, exemplar=q == 0.99) for q, name in QUANTILES),
                limits=[(2.5, RED)],
            ),
        ),
    ],
)

STAGES = Row(
    "Stages: who is the slowest",
    8,
    [
        (
            12,
            table(
                "Stages, slowest first",
                "Computing near 100 %: this stage bounds its pipeline. A lag at one stage and none before it: that "
                "stage is behind. KV rate: bytes for each second that a link had KV to send.",
                ["pipeline", "rank", "service", "instance"],
                Column("compute per token", PER_TOKEN, "s"),
                Column("computing", COMPUTING, "percentunit", [(0.7, YELLOW), (0.9, RED)], gauge=True),
                Column("lag, steps", staged(of("kvmesh_log_lag_steps")), "none", [(2, YELLOW), (8, RED)]),
                Column("no progress for", staged(of("kvmesh_log_age_seconds")), "s", [(1, YELLOW), (2, RED)]),
                Column("KV rate", LINK_RATE, "Bps"),
                sort="compute per token",
            ),
        ),
        (
            6,
            timeseries(
                "Compute for each token",
                "Seconds of step time for each prompt token, by rank. Stages of equal share and speed lie on one line.",
                "s",
                Query(PER_TOKEN, STAGE),
            ),
        ),
        (
            6,
            timeseries(
                "Time spent computing",
                "Share of the time in which the stage computes steps. The one nearest to 100 % bounds the pipeline.",
                "percentunit",
                Query(COMPUTING, STAGE),
                most=1,
            ),
        ),
        (
            12,
            bands(
                "Log lag, by rank",
                "Steps that rank 0 wrote and the rank has not applied. Colour that stays from one rank on down names "
                "the culprit: the first of them.",
                "none",
                Query(staged(of("kvmesh_log_lag_steps")), STAGE),
                limits=[(1, BLUE), (2, YELLOW), (4, ORANGE), (8, RED)],
            ),
        ),
        (
            6,
            timeseries(
                "KV rate while sending",
                "KV bytes for each second that a link had something to send, waits for the decoder's credit included.",
                "Bps",
                Query(LINK_RATE, STAGE),
            ),
        ),
        (
            6,
            timeseries(
                "KV sent",
                "KV bytes for each second of the clock, stacked.",
                "Bps",
                Query(staged(rate("kvmesh_kv_sent_bytes_total")), STAGE),
                stack=True,
            ),
        ),
    ],
)

TOKENS = Row(
    "Tokens",
    8,
    [
        (
            8,
            timeseries(
                "Time between two tokens",
                "Of one request, as its client sees it.",
                "s",
                *(Query(quantile(q, "kvmesh_token_gap_seconds"), name) for q, name in QUANTILES),
            ),
        ),
        (
            8,
            timeseries(
                "Throughput",
                "Prompt tokens computed (each counted once, at rank 0), tokens decoded, and tokens of answers that "
                "ended.",
                "suffix: tok/s",
                Query(f"sum({of_rank_0(rate('kvmesh_prefill_tokens_total'))})", "prompt"),
                Query(f"sum({rate('kvmesh_decode_tokens_total')})", "decoded"),
                Query(f"sum({rate('kvmesh_output_tokens_sum')})", "answered"),
            ),
        ),
        (
            8,
            timeseries(
                "Decode steps",
                "Mean time of a decode step, and rooms in the last one, by decoder: what a larger batch costs each "
                "token.",
                "s",
                Query(mean("kvmesh_decode_step_seconds", by="instance"), "{{instance}} step"),
                Query(of("kvmesh_decode_batch_rooms"), "{{instance}} rooms"),
                overrides=[on_the_right("rooms$", "none")],
            ),
        ),
    ],
)

QUEUES = Row(
    "Queues and memory",
    8,
    [
        (
            6,
            timeseries(
                "Requests, by where they are",
                "Open at gateways; of those: held by the registry for a pair, waiting at decoders, waiting at rank 0, "
                "decoding.",
                "none",
                Query(f"sum({of('kvmesh_requests_open')})", "open"),
                Query(f"sum({of('kvmesh_room_requests_held')})", "held for a pair"),
                Query(
                    f"sum({of('kvmesh_rooms_waiting')} and on (job, instance) {of('kvmesh_pairings_standing')})",
                    "waiting at decoders",
                ),
                Query(f"sum({of_rank_0(of('kvmesh_rooms_waiting'))})", "waiting at rank 0"),
                Query(
                    f"sum({of('kvmesh_rooms_running')} and on (job, instance) {of('kvmesh_pairings_standing')})",
                    "with pages at decoders",
                ),
            ),
        ),
        (
            6,
            timeseries(
                "Prompts queued, by pipeline",
                "How long the pipeline will take for the prompt tokens that it has accepted: what a new request waits.",
                "s",
                Query(of_rank_0(of("kvmesh_queued_prefill_seconds")), "{{pipeline}}"),
                limits=[(10, RED)],
            ),
        ),
        (
            6,
            timeseries(
                "KV pages of pipelines",
                "Every stage of a pipeline uses the pages that rank 0 gives out, so rank 0 is shown.",
                "none",
                Query(f"sum by (state) ({of_rank_0(of('kvmesh_pages'))})", "{{state}}"),
                stack=True,
            ),
        ),
        (
            6,
            timeseries(
                "KV pages of decoders",
                "Together the pools. Reserved for prompt and output before any prefill: receiving until all KV is "
                "there.",
                "none",
                Query(
                    f"sum by (state) ({of('kvmesh_pages')} and on (job, instance) {of('kvmesh_pairings_standing')})",
                    "{{state}}",
                ),
                stack=True,
            ),
        ),
    ],
)

WRONG = Row(
    "What goes wrong",
    8,
    [
        (
            6,
            timeseries(
                "Requests ended, by code",
                'OK, and what else. docs/operations.md, "Common refusals", says what each code asks for.',
                "reqps",
                Query(or_none(f"sum by (code) ({rate('kvmesh_requests_total')}) > 0", "code"), "{{code}}"),
                stack=True,
            ),
        ),
        (
            6,
            timeseries(
                "Errors by reason",
                "Calls answered with an error, also those between services, by service and the reason that the caller "
                "was told.",
                "none",
                Query(new_events("kvmesh_rpc_errors_total", "service, reason"), "{{service}} {{reason}}"),
                bars=True,
            ),
        ),
        (
            6,
            timeseries(
                "Failed attempts by reason",
                "Rooms lost or refused. The gateway takes another room while it may; clients see a pause.",
                "none",
                Query(events("kvmesh_attempts_failed_total", "reason"), "{{reason}}"),
                bars=True,
            ),
        ),
        (
            6,
            table(
                "Alerts",
                'Firing now. docs/operations.md, "Alerts", has an entry for each.',
                ["alertname", "severity", "pipeline", "rank", "service", "instance"],
                Column("firing", FIRING, "none"),
            ),
        ),
    ],
)

DASHBOARD = dashboard(
    "kvmesh",
    "kvmesh: where the time goes",
    "One mesh at a glance: the parts of the time to the first token, the stages side by side, tokens, queues, memory, "
    "errors.",
    tag="kvmesh",
    variables=[
        variable("job", "Mesh", "label_values(kvmesh_ready, job)", many=False),
        variable("pipeline", "Pipeline", 'label_values(kvmesh_stage_info{job="$job"}, pipeline)', many=True),
    ],
    rows=[GLANCE, WHERE_TIME_GOES, STAGES, TOKENS, QUEUES, WRONG],
)
