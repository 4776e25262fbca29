"""The second dashboard: each process, and the protocol between them: leases, generations, pairings, log, rooms, frames."""

from board import Row, dashboard, variable
from grafana import (
    BLUE,
    GREEN,
    RED,
    YELLOW,
    Column,
    Query,
    bands,
    on_the_right,
    stat,
    table,
    timeseries,
)
from queries import MEMBER, WINDOW, events, mean, of, of_rank_0, quantile, rate, staged

STAGE = "{{pipeline}} rank {{rank}}"
WHO = "{{service}} {{instance}}"
DIGESTS = f'count by (pipeline) (count_values by (pipeline) ("digest", {staged(of("kvmesh_log_digest"))}))'
LATE_OR_FOREIGN = rate("kvmesh_frames_total", 'outcome=~"late|foreign"')
ABORTED = rate("kvmesh_rpc_errors_total", 'code="ABORTED"')


def member(metric: str) -> str:
    """A metric of the chosen processes."""
    return of(metric, whose=MEMBER)


WHO_IS_THERE = Row(
    "Who is there",
    8,
    [
        (
            12,
            bands(
                "Ready",
                "Able to serve. Registry: holds its term. Stage: connected to the last rank. Decoder: registered. "
                "Gateway: some pipeline and decoder are paired.",
                "none",
                Query(member("kvmesh_ready"), WHO),
                limits=[(1, GREEN)],
                base=RED,
                texts=[(0, "not ready"), (1, "ready")],
            ),
        ),
        (
            12,
            table(
                "Versions",
                "What runs where, and since when.",
                ["service", "instance", "version"],
                Column(
                    "live",
                    f"{member('kvmesh_live')} * on (job, instance) group_left (version) {member('kvmesh_build_info')}",
                    "none",
                    [(1, GREEN)],
                    RED,
                ),
                Column(
                    "up for",
                    f"(time() - {member('process_start_time_seconds')})"
                    f" * on (job, instance) group_left (version) {member('kvmesh_build_info')}",
                    "s",
                ),
            ),
        ),
    ],
)

REGISTRY = Row(
    "Registry",
    7,
    [
        (
            3,
            stat(
                "Term",
                "The registry's term: it rises with each start of the registry.",
                "none",
                Query(of("kvmesh_term")),
                base=BLUE,
            ),
        ),
        (
            6,
            timeseries(
                "Leases",
                "Stages and decoders with a running lease, and pipelines that serve.",
                "none",
                Query(of("kvmesh_leases"), "{{role}}s"),
                Query(of("kvmesh_pipelines_whole"), "whole pipelines"),
            ),
        ),
        (
            5,
            timeseries(
                "Leases ended, by reason",
                "lease_expired: a member was silent. stream_ended: it went, or the network between.",
                "none",
                Query(events("kvmesh_leases_ended_total", "reason"), "{{reason}}"),
                bars=True,
            ),
        ),
        (
            5,
            timeseries(
                "Rooms minted",
                "Rooms given out a second; one for each attempt of a request.",
                "suffix: /s",
                Query(f"sum({rate('kvmesh_rooms_minted_total')})", "rooms"),
                Query(f"sum({rate('kvmesh_attempts_total')})", "attempts, as gateways count"),
            ),
        ),
        (
            5,
            timeseries(
                "Time to get a room",
                "AssignRoom, waits for a pair included.",
                "s",
                Query(quantile(0.5, "kvmesh_assign_seconds"), "p50"),
                Query(quantile(0.95, "kvmesh_assign_seconds"), "p95"),
            ),
        ),
    ],
)

LIVES = Row(
    "Generations and pairings",
    7,
    [
        (
            6,
            timeseries(
                "Generations begun",
                "By stage: a pipeline starts anew after the loss of any of its stages. Minted: as the registry counts.",
                "none",
                Query(staged(f"increase({of('kvmesh_generations_total')}[{WINDOW}])"), STAGE),
                Query(f"sum(increase({of('kvmesh_generations_minted_total')}[{WINDOW}]))", "minted"),
            ),
        ),
        (
            6,
            timeseries(
                "Generations ended, by reason",
                "As each stage saw it; draining is an end in order.",
                "none",
                Query(events("kvmesh_generations_ended_total", "instance, reason"), "{{instance}} {{reason}}"),
                bars=True,
            ),
        ),
        (
            6,
            timeseries(
                "Pairings and links",
                "Pairings that stand at each decoder; links to decoders at each stage. At rest every stage has one "
                "link for each decoder; in shared memory: with those on its own host.",
                "none",
                Query(member("kvmesh_pairings_standing"), "decoder {{instance}}"),
                Query(staged(of("kvmesh_links_open")), STAGE),
                Query(staged(of("kvmesh_segments_open")), f"{STAGE}, in shared memory"),
            ),
        ),
        (
            6,
            timeseries(
                "Pairings made, and ended by reason",
                "link_stalled: a link had KV to send and made no progress for the watchdog's time.",
                "none",
                Query(f"sum(increase({of('kvmesh_pairings_total')}[{WINDOW}]))", "made"),
                Query(events("kvmesh_pairings_ended_total", "reason"), "ended: {{reason}}"),
                bars=True,
            ),
        ),
    ],
)

LOG = Row(
    "The log",
    8,
    [
        (
            4,
            stat(
                "Logs in view",
                "Different digests among the stages of a pipeline. Under load they are at different steps; at rest it "
                "must be 1.",
                "none",
                Query(DIGESTS, "{{pipeline}}"),
                base=BLUE,
                named=True,
            ),
        ),
        (
            8,
            timeseries(
                "Log position, by rank",
                "Steps of the running generation that came, were applied here, and are confirmed by all ranks behind.",
                "none",
                Query(staged(of("kvmesh_log_steps_received")), f"{STAGE} received"),
                Query(staged(of("kvmesh_log_steps_applied")), f"{STAGE} applied"),
                Query(staged(of("kvmesh_log_steps_confirmed")), f"{STAGE} confirmed"),
            ),
        ),
        (
            6,
            timeseries(
                "Steps",
                "Applied each second, by rank; and steps in flight at rank 0, which bounds how far it runs ahead.",
                "suffix: /s",
                Query(staged(rate("kvmesh_steps_total")), STAGE),
                Query(of_rank_0(of("kvmesh_steps_in_flight")), "{{pipeline}} in flight"),
            ),
        ),
        (
            6,
            timeseries(
                "No progress for, by rank",
                "Time since the stage last moved on a step that it owes. The watchdog ends the generation at 2 s.",
                "s",
                Query(staged(of("kvmesh_log_age_seconds")), STAGE),
                limits=[(2, RED)],
            ),
        ),
    ],
)

ROOMS = Row(
    "Rooms",
    8,
    [
        (
            6,
            timeseries(
                "Rooms open",
                "Rooms that have not ended, by process.",
                "none",
                Query(member("kvmesh_rooms_open"), WHO),
            ),
        ),
        (
            6,
            timeseries(
                "Rooms ended",
                "At rank 0 and at decoders, each second, by reason. done and finished: well. Refused rooms count as well.",
                "suffix: /s",
                Query(f"sum by (service, reason) ({rate('kvmesh_rooms_ended_total')}) > 0", "{{service}} {{reason}}"),
                stack=True,
            ),
        ),
        (
            6,
            timeseries(
                "Waits of a room, p95",
                "reserve: at the decoder, for pages. admission: at rank 0, until it is computed. transfer tail: for "
                "KV that is on its way after the first token is known.",
                "s",
                Query(quantile(0.95, "kvmesh_reserve_seconds"), "reserve"),
                Query(quantile(0.95, "kvmesh_admission_seconds"), "admission"),
                Query(quantile(0.95, "kvmesh_transfer_tail_seconds"), "transfer tail"),
            ),
        ),
        (
            6,
            timeseries(
                "Requests, whole",
                "Arrival until the last token, p50 and p95; and the mean length of prompt and answer.",
                "s",
                Query(quantile(0.5, "kvmesh_request_seconds"), "p50", exemplar=True),
                Query(quantile(0.95, "kvmesh_request_seconds"), "p95"),
                Query(mean("kvmesh_prompt_tokens"), "prompt tokens"),
                Query(mean("kvmesh_output_tokens"), "output tokens"),
                overrides=[on_the_right("tokens$", "none")],
            ),
        ),
    ],
)

FRAMES = Row(
    "Frames and fences",
    7,
    [
        (
            6,
            timeseries(
                "Frames, by outcome",
                "written; repeated; late: no such room any more; foreign: another pairing; corrupt: checksum or shape.",
                "suffix: /s",
                Query(f"sum by (outcome) ({rate('kvmesh_frames_total')})", "{{outcome}}"),
                stack=True,
            ),
        ),
        (
            6,
            timeseries(
                "KV sent and received",
                "By all stages, and by all decoders: equal but for what is in flight.",
                "Bps",
                Query(f"sum({rate('kvmesh_kv_sent_bytes_total')})", "sent"),
                Query(f"sum({rate('kvmesh_kv_received_bytes_total')})", "received"),
            ),
        ),
        (
            6,
            timeseries(
                "Fenced",
                "Turned away because meant for an older room, generation, process or term: calls, and frames late or "
                "foreign. A few after an abort or a loss are as it should be.",
                "suffix: /s",
                Query(f"sum({ABORTED}) or vector(0)", "calls"),
                Query(f"sum({LATE_OR_FOREIGN})", "frames"),
            ),
        ),
        (
            6,
            timeseries(
                "Reconnects and unknown messages",
                "Leases, watches and pairings tried again, by process; lease messages that the registry does not know.",
                "none",
                Query(f"increase({member('kvmesh_reconnects_total')}[{WINDOW}])", WHO),
                Query(f"increase({of('kvmesh_unknown_messages_total')}[{WINDOW}])", "unknown messages"),
            ),
        ),
    ],
)

PROCESSES = Row(
    "Processes",
    7,
    [
        (
            6,
            timeseries(
                "Event loop late by",
                "How late the loop's last beat was, or the one that is due. Together: of all beats within the window, so that "
                "no stall falls between two scrapes. Late by seconds loses leases and pairings.",
                "s",
                Query(member("kvmesh_loop_lag_seconds"), WHO),
                Query(f"increase({member('kvmesh_loop_late_seconds_total')}[{WINDOW}])", f"{WHO} together"),
                limits=[(0.1, YELLOW)],
            ),
        ),
        (
            6,
            timeseries(
                "CPUs in use",
                "CPU seconds a second.",
                "none",
                Query(rate("process_cpu_seconds_total", whose=MEMBER), WHO),
            ),
        ),
        (
            6,
            timeseries(
                "Resident memory",
                "Model, KV pools and the rest of the process.",
                "bytes",
                Query(member("process_resident_memory_bytes"), WHO),
            ),
        ),
        (
            6,
            timeseries(
                "Open files",
                "Share of the file descriptors that the process may open.",
                "percentunit",
                Query(f"{member('process_open_fds')} / {member('process_max_fds')}", WHO),
                limits=[(0.8, RED)],
            ),
        ),
    ],
)

DASHBOARD = dashboard(
    "kvmesh-members",
    "kvmesh: members and protocol",
    "Each process of one mesh, and what passes between them: leases, generations, pairings, the log, rooms, frames.",
    tag="kvmesh",
    variables=[
        variable("job", "Mesh", "label_values(kvmesh_ready, job)", many=False),
        variable("pipeline", "Pipeline", 'label_values(kvmesh_stage_info{job="$job"}, pipeline)', many=True),
        variable("instance", "Process", 'label_values(kvmesh_ready{job="$job"}, instance)', many=True),
    ],
    rows=[WHO_IS_THERE, REGISTRY, LIVES, LOG, ROOMS, FRAMES, PROCESSES],
)
