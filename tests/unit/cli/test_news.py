from kvmesh.cli.news import News, decoder_name
from kvmesh.protocol.ids import Term, compose
from kvmesh.v1 import bootstrap_pb2 as pb
from kvmesh.v1.types_pb2 import LayerRange, Member

G1, G2 = compose(Term(1), 1), compose(Term(1), 2)
EMPTY, WAITING, ADMITTED, LOST = pb.SEAT_STATE_EMPTY, pb.SEAT_STATE_WAITING, pb.SEAT_STATE_ADMITTED, pb.SEAT_STATE_LOST
DECODER = 0xABCDEF0123456789


def seat(
    state: pb.SeatState.ValueType, member: int = 0, order: int = 0, waits_for: str = "", draining: bool = False
) -> pb.SeatView:
    return pb.SeatView(
        state=state,
        member=Member(incarnation=member) if member else None,
        waits_for=waits_for,
        layers=LayerRange(begin=0, end=3),
        admitted_order=order,
        load=pb.Heartbeat(draining=draining),
    )


def picture(
    *seats: pb.SeatView, generation: int = 0, term: int = 1, decoders: list[pb.DecoderView] | None = None
) -> pb.WatchMeshResponse:
    pipelines = [pb.PipelineView(pipeline="p0", generation=generation, seats=seats)] if seats else []
    return pb.WatchMeshResponse(term=term, pipelines=pipelines, decoders=decoders)


def decoder(*generations: int, draining: bool = False) -> pb.DecoderView:
    load = pb.Heartbeat(paired_generations=generations, draining=draining)
    return pb.DecoderView(member=Member(incarnation=DECODER), load=load)


def whole(
    generation: int = G1, members: tuple[int, int] = (10, 11), orders: tuple[int, int] = (2, 1)
) -> list[pb.SeatView]:
    return [seat(ADMITTED, m, o) for m, o in zip(members, orders, strict=True)]


def test_admissions_of_one_picture_are_told_in_the_order_they_happened() -> None:
    assert News().since(picture(*whole(), generation=G1))[-2:] == [
        "p0 rank 1 admitted",
        "p0 rank 0 admitted → p0 whole (generation 1.1)",
    ]


def test_whoever_waits_is_told_with_whom_it_waits_for() -> None:
    news = News()
    assert news.since(picture(seat(WAITING, 10, waits_for="rank 1 of p0"), seat(EMPTY))) == [
        "p0 rank 0 registered (layers 0:3)",
        "p0 rank 0 waits for rank 1 of p0",
    ]
    assert news.since(picture(seat(WAITING, 10, waits_for="rank 1 of p0"), seat(ADMITTED, 11, 1))) == [
        "p0 rank 1 registered (layers 0:3)",
        "p0 rank 1 admitted",
    ]


def test_the_same_picture_again_is_no_news() -> None:
    news = News()
    same = picture(*whole(), generation=G1, decoders=[decoder(G1)])
    news.since(same)
    assert news.since(same) == []


def test_a_lost_stage_and_the_end_of_its_generation_are_told_and_then_the_next_one() -> None:
    news = News()
    news.since(picture(*whole(), generation=G1))
    assert news.since(picture(seat(ADMITTED, 10, 2), seat(LOST, 11, 1))) == [
        "p0 rank 1 lost",
        "p0 generation 1.1 is over",
    ]
    again = news.since(picture(*whole(members=(10, 12), orders=(4, 3)), generation=G2))
    assert again[-2:] == ["p0 rank 1 admitted", "p0 rank 0 admitted → p0 whole (generation 1.2)"]


def test_a_newcomer_in_a_seat_means_that_the_one_before_is_lost() -> None:
    news = News()
    news.since(picture(*whole(), generation=G1))
    lines = news.since(picture(seat(ADMITTED, 10, 2), seat(WAITING, 12)))
    assert lines[0] == "p0 rank 1 lost"
    assert "p0 rank 1 registered (layers 0:3)" in lines


def test_a_decoder_is_told_from_its_registration_to_its_loss() -> None:
    news, name = News(), decoder_name(DECODER)
    steps = [
        (picture(*whole(), generation=G1, decoders=[decoder()]), f"{name} registered"),
        (picture(*whole(), generation=G1, decoders=[decoder(G1)]), f"{name} paired with p0 (generation 1.1)"),
        (picture(*whole(), generation=G1, decoders=[decoder()]), f"{name} parted from p0 (generation 1.1)"),
        (picture(*whole(), generation=G1, decoders=[decoder(draining=True)]), f"{name} drains"),
        (picture(*whole(), generation=G1), f"{name} lost"),
    ]
    assert [news.since(p)[-1] for p, _ in steps] == [line for _, line in steps]


def test_a_pairing_is_named_by_its_pipeline_also_after_that_pipelines_generation() -> None:
    news = News()
    news.since(picture(*whole(), generation=G1, decoders=[decoder(G1)]))
    lines = news.since(picture(*whole(orders=(4, 3)), generation=G2, decoders=[decoder()]))
    assert f"{decoder_name(DECODER)} parted from p0 (generation 1.1)" in lines


def test_a_stage_that_drains_is_told_once() -> None:
    news = News()
    news.since(picture(*whole(), generation=G1))
    draining = picture(seat(ADMITTED, 10, 2, draining=True), seat(ADMITTED, 11, 1), generation=G1)
    assert news.since(draining) == ["p0 rank 0 drains"]
    assert news.since(draining) == []


def test_another_term_means_that_the_registry_restarted() -> None:
    news = News()
    news.since(picture(term=1))
    assert news.since(picture(term=2)) == ["the registry restarted: term 2"]


def test_a_decoder_is_called_as_in_its_own_log() -> None:
    assert decoder_name(DECODER) == "decoder abcdef"
