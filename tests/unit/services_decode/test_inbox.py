"""The queue of one thread."""

import threading

from services.decode.inbox import Inbox


def test_stopped_while_it_takes_a_record_the_thread_takes_no_turn() -> None:
    inbox: Inbox[int] = Inbox()
    taken: list[object] = []

    def take(record: int) -> None:
        taken.append(record)
        inbox.stop()

    def turn() -> bool:
        taken.append("turn")
        return True

    thread = threading.Thread(target=inbox.serve, args=(take, turn))
    inbox.post(1)
    inbox.post(2)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert taken == [1]
