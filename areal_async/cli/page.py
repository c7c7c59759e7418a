"""`areal-async view`: runs in the browser, on a served page or in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from areal_async.cli.tools import AsJson, readable_errors, show

page = typer.Typer()


@page.command()
def view(
    targets: Annotated[
        list[Path], Argument(metavar="RUN|DIR", help="Folders of runs, or one folder of runs.")
    ] = [Path("runs")],  # noqa: B006
    port: Annotated[int, Option(min=0, max=65535, help="Port to serve at; 0 picks one.")] = 0,
    no_open: Annotated[bool, Option("--no-open", help="Open no browser.")] = False,
    report: Annotated[
        Path | None, Option(metavar="FILE.HTML", help="Write the page as one file instead, and end.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show runs in the browser, live, until Ctrl-C. With --report, write one file instead. Several runs are
    compared: their curves are drawn together, with the fields in which their jobs differ."""
    several = len({target.absolute() for target in targets}) > 1
    if several and report is None:
        raise typer.BadParameter("several runs are compared in one file: add --report FILE.HTML")
    with readable_errors():
        from areal_async.launch.run_handle import Run
        from areal_async.show.page.folder import runs_in

        folders = [
            # `Run.open` resolves a job file or a URL. If it finds no run, its error lists the existing runs.
            target if not several and target.is_dir() and runs_in(target) else Run.open(target).folder
            for target in dict.fromkeys(targets)
        ]
        if report is None:
            return _serve(folders[0].resolve(), port, no_open, as_json)
        from areal_async.show.page.report import write_report

        write_report([Run.open(folder).folder.resolve() for folder in folders], report)
        show({"report": str(report), "size_bytes": report.stat().st_size}, f"written: {report}", as_json)


def _serve(folder: Path, port: int, no_open: bool, as_json: bool) -> None:
    import asyncio
    import signal
    import webbrowser

    from areal_async.base.addresses import LOOPBACK
    from areal_async.base.errors import EndpointError
    from areal_async.base.http_server import HttpLimits, HttpServer, listen
    from areal_async.show.page.app import new_token, view_app

    async def serve() -> None:
        token = new_token()
        try:
            listening = listen(LOOPBACK, port)
        except OSError as error:
            raise EndpointError(
                f"cannot listen on port {port}: {error.strerror}. Give another --port."
            ) from error
        server = HttpServer(view_app(folder, token), listening, HttpLimits(connections=64), name="page")
        server.start()
        over = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, over.set)
        address = f"{server.url}/#token={token}"
        show({"url": server.url, "token": token, "address": address}, f"{address}\nCtrl-C ends it.", as_json)
        if not no_open:
            await asyncio.to_thread(webbrowser.open, address)
        await over.wait()
        await server.close()

    asyncio.run(serve())
