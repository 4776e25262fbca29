"""A real Prometheus on the configuration and rules that are shipped, for the seconds of a test.

What differs from the shipped files is written out in `quickened`: how often it looks, and the minutes that rates look back.
"""

import asyncio
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic, time
from types import TracebackType
from typing import Any, Self

import httpx
from monitoring_files import MONITORING, PROMETHEUS

START_SECONDS = 20.0
ANSWER_SECONDS = 15.0
_LOOK_SECONDS = 0.25
"""A query can't be waited on: it is asked again."""

SCRAPE_SECONDS = 0.5
LOOK_BACK_SECONDS = 10
"""In place of the minutes of rules, and of Grafana's rate interval."""

Series = dict[str, Any]


def quickened(directory: Path, targets: Mapping[str, Sequence[str]]) -> Path:
    """A copy of deploy/monitoring that looks twice a second and ten seconds back; returns its configuration.

    Args:
        targets: addresses of metrics pages by service.
    """
    copy = shutil.copytree(MONITORING, directory / "monitoring")
    config = copy / "prometheus.yaml"
    text, count = re.subn(
        r"(scrape|evaluation)_interval: 15s", rf"\1_interval: {SCRAPE_SECONDS * 1000:g}ms", config.read_text()
    )
    assert count == 2, "both intervals are there"
    config.write_text(text)
    for rules in (copy / "rules").glob("*.rules.yaml"):
        text = re.sub(r"\[\d+[mh]\]", f"[{LOOK_BACK_SECONDS}s]", rules.read_text())
        rules.write_text(re.sub(r"offset \d+[mh]", f"offset {LOOK_BACK_SECONDS}s", text))
    groups = [{"labels": {"service": service}, "targets": list(pages)} for service, pages in targets.items()]
    (copy / "targets" / "mesh.json").write_text(json.dumps(groups))
    return config


class Prometheus:
    """A Prometheus while it is entered."""

    def __init__(self, config: Path, directory: Path) -> None:
        """Args: `directory` takes its data."""
        assert PROMETHEUS is not None
        self._command = (
            *(PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}"),
            *("--web.listen-address=127.0.0.1:0", "--enable-feature=exemplar-storage"),
        )
        self._log: list[str] = []

    async def __aenter__(self) -> Self:
        """Starts it and waits until it answers."""
        self._process = await asyncio.create_subprocess_exec(*self._command, stderr=asyncio.subprocess.PIPE)
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        ready = asyncio.Event()
        self._reading = asyncio.create_task(self._read(address, ready))
        try:
            async with asyncio.timeout(START_SECONDS):
                self._client = httpx.AsyncClient(base_url=f"http://{await address}/api/v1/", trust_env=False)
                await ready.wait()
        except TimeoutError as error:
            self._process.kill()
            await self._process.wait()
            error.add_note("\n".join(self._log[-15:]))
            raise
        self.began = time()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()
        self._process.terminate()
        await self._process.wait()
        await self._reading

    async def _read(self, address: asyncio.Future[str], ready: asyncio.Event) -> None:
        """Follows its log to the end: where it listens, and when it answers."""
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self._log.append(text := line.decode().rstrip())
            found = re.search(r"Listening on.* address=(\S+)", text)
            if found and not address.done():
                address.set_result(found[1])
            if "ready to receive web requests" in text:
                ready.set()

    @property
    def base_url(self) -> str:
        """Of its HTTP API."""
        return str(self._client.base_url)

    async def ask(self, path: str, **parameters: Any) -> Any:
        """The data of an answer of its HTTP API."""
        response = await self._client.get(path, params=parameters)
        assert response.status_code == 200, f"{path} {parameters}: {response.text}"
        return response.json()["data"]

    async def now(self, expr: str) -> list[Series]:
        """The series of a query, at this moment."""
        return (await self.ask("query", query=expr))["result"]

    async def so_far(self, expr: str) -> list[Series]:
        """The series of a query, over all the time it runs."""
        return (await self.ask("query_range", query=expr, start=self.began, end=time(), step=SCRAPE_SECONDS))["result"]

    async def answered(self, expr: str, *, instant: bool = True) -> list[Series]:
        """The series of a query, as soon as one of them has a value; none when that takes too long."""
        deadline = monotonic() + ANSWER_SECONDS
        while True:
            series = await (self.now(expr) if instant else self.so_far(expr))
            if any(figures(one) for one in series) or monotonic() > deadline:
                return [one for one in series if figures(one)]
            await asyncio.sleep(_LOOK_SECONDS)


def figures(series: Series) -> list[float]:
    """The values of a series that are numbers."""
    points = series.get("values") or [series["value"]]
    return [float(value) for _, value in points if value != "NaN"]
