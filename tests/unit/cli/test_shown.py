from kvmesh.cli.shown import shown
from kvmesh.v1 import bootstrap_pb2, trace_pb2, types_pb2

EVIL = "evil\x1b[2J\n\x9b1mname\u202e"


def test_texts_at_every_depth_lose_their_control_characters() -> None:
    span = trace_pb2.Span(name=EVIL, error=EVIL, trace_id=b"\x1b" * 16, attributes={EVIL: EVIL}, room=7)
    told = shown(trace_pb2.ListSpansResponse(process=EVIL, spans=[span]))
    (cleaned,) = told.spans
    for text in (told.process, cleaned.name, cleaned.error, *cleaned.attributes, *cleaned.attributes.values()):
        assert text == "evil [2J  1mname "
    assert (cleaned.trace_id, cleaned.room) == (b"\x1b" * 16, 7), "what is no text stays"


def test_of_a_picture_too_those_in_lists() -> None:
    seat = bootstrap_pb2.SeatView(waits_for="rank\x1b[31m 1")
    picture = bootstrap_pb2.WatchMeshResponse(
        pipelines=[bootstrap_pb2.PipelineView(pipeline="p0\r", seats=[seat])],
        limits=bootstrap_pb2.MeshLimits(model_name="m\x00"),
    )
    assert shown(picture).pipelines[0].pipeline == "p0 "
    assert picture.pipelines[0].seats[0].waits_for == "rank [31m 1"
    assert picture.limits.model_name == "m "
    timing = types_pb2.Timing(failed_attempts=["stage_lost", "x\ny"])
    assert list(shown(timing).failed_attempts) == ["stage_lost", "x y"]


def test_a_long_text_ends_early() -> None:
    assert len(shown(trace_pb2.Span(error="e" * 3000)).error) == 300
