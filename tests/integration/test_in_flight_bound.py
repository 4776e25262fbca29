"""The bound on KV of all links, in a real decoder: it is given back on every path, or the decoder would read no more."""

from pathlib import Path

from service_process import end_in_background, start_in_background
from test_decode import PROMPT, Decoder, paired, tokens_of

BOUND_MIB, TURNS = 1, 4
NO_ROOM = 987_654
TOKENS = 4096
"""Of which the KV is several times the bound."""


async def test_after_frames_of_no_room_and_lost_pairings_a_decoder_at_its_bound_still_reads(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    flags = ("--state-dir", str(tmp_path / "state"), "--lease-seconds", "30")
    registry, said = start_in_background("bootstrap", tmp_path / "registry.log", *flags)
    flags = ("--bootstrap", said["address"], "--model", str(tiny_model_dir), "--page-size", "4", "--num-pages", "64")
    bound = ("--in-flight-mib", str(BOUND_MIB), "--shared-mib", "0")
    process, own = start_in_background("decode", tmp_path / "decode.log", *flags, *bound)
    try:
        decoder = Decoder(
            said["address"], own["address"], own["health"], own["metrics"], tiny_model_dir, tmp_path / "decode.log"
        )
        async with paired(decoder) as mesh:
            assert TOKENS * mesh.pipeline.bytes_per_token > 4 * BOUND_MIB << 20
            for turn in range(1, TURNS + 1):
                await mesh.pipeline.paired(turn)
                mesh.pipeline.send_kv(NO_ROOM, TOKENS)
                mesh.pipeline.send_rubbish()
                mesh.pipeline.send_kv(NO_ROOM, TOKENS)
            await mesh.pipeline.paired(TURNS + 1)
            assignment = await mesh.assigned()
            call = mesh.generate(assignment)
            await mesh.pipeline.hear("admit")
            mesh.pipeline.send_first_token(assignment.room, 42)
            mesh.pipeline.send_kv(assignment.room, len(PROMPT))
            assert sum(len(r.tokens) for r in await tokens_of(call)) == 4
    finally:
        assert [end_in_background(p) for p in (process, registry)] == [0, 0]
