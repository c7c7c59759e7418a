"""`areal-async view | compare`: a run in the browser, as a page that is served or as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from areal_async.cli.tools import AsJson, readable_errors, show

page = typer.Typer()


@page.command()
def view(
    target: Annotated[
        Path, typer.Argument(metavar="RUN|DIR", help="The folder of a run, or one of runs.")
    ] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to serve at; 0 picks one.")] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Open no browser.")] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.HTML", help="Write the page as one file instead, and end.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show runs in the browser, those that go on as they go on, until Ctrl-C; or write one file to send."""
    with readable_errors():
        from areal_async.show.page.folder import runs_in

        found = runs_in(target) if target.is_dir() else []
        if not found:
            from areal_async.launch.run_handle import Run

            target = Run.open(target).folder  # a job file or a URL, or the error that says what there is
        if report is not None:
            _write([target], report, as_json)
            return
        _serve(target.resolve(), port, no_open, as_json)


@page.command()
def compare(
    targets: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Folders of runs.")],
    out: Annotated[Path, typer.Option(metavar="FILE.HTML", help="The file to write.")] = Path("compare.html"),
    as_json: AsJson = False,
) -> None:
    """Write one file that draws runs over each other, with the fields in which their jobs differ."""
    if len({target.absolute() for target in targets}) < 2:
        raise typer.BadParameter(
            "one run has nothing to compare. Name two, or use `view RUN --report FILE.HTML`."
        )
    with readable_errors():
        _write(targets, out, as_json)


def _write(targets: list[Path], out: Path, as_json: bool) -> None:
    from areal_async.launch.run_handle import Run
    from areal_async.show.page.report import write_report

    write_report([Run.open(target).folder.resolve() for target in targets], out)
    show({"report": str(out), "size_bytes": out.stat().st_size}, f"written: {out}", as_json)


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
