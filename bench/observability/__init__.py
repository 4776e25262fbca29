"""What do metrics and spans cost, in decode tokens a second? `python -m bench.observability --json`

One mesh of real processes streams long answers, and with each run all that observes it is turned on or off: on, off, off, on.
On is the product as it is: spans that continue the client's trace, and a scraper that reads every metrics page as often as
the shipped Prometheus does, one after the other. Off, the functions that record are replaced by empty ones inside the running
processes, and nobody scrapes. The product has no such switch and needs none: the bench starts each service with the switch
beside it. Few runs meet a scrape; `--scrape-seconds 1` shows what fifteen times as many would cost.

The same processes are compared with themselves, in the middle of the same answers: two meshes side by side differ by more
than what is looked for. Runs are short and there are many, because what else the machine does changes from second to second,
and hits two neighbours alike. Spans belong to rooms that begin and end, so in each run a short request passes by; it also
proves the switch: on, every process kept its spans; off, none did, and not one value on a page moved. The interval is that of
order statistics, exact for any noise as long as pairs do not depend on each other; it draws no numbers.

What stays on both sides: the arguments of a call, among them two readings of the clock a step, and an empty call where one
recorded. That is a tenth of a microsecond each, of steps that take milliseconds.

    interval.py   the median of the pairs, and its interval
    switch.py     what is replaced in a process, and by what
    process.py    one service with the switch beside it
    mesh.py       the mesh: turned on and off, its pages and spans read
    pages.py      metrics pages over HTTP, and the scraper
    load.py       long answers side by side, and short requests that pass by
    proof.py      whether on was on, and off was off
    pairs.py      runs, and pairs of them
    tiny.py       a model so small that recording weighs the most
"""
