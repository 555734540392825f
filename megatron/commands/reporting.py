"""Writing and serving the report of a run, for tools/report.py."""

from __future__ import annotations

import argparse
import http
import http.server
from collections.abc import Sequence
from pathlib import Path

from megatron.core.durable_files import write_durably
from megatron.core.terminal import format_error, print_line
from megatron.training.reporting.run_report import NoRecordError, collect_facts, render_page

REFRESH_SECONDS = 15  # between two updates of a served page
WAITING = "waiting for the first record"
IDLE_SECONDS = 10  # before a connection without a request is closed
HOSTS = ("127.0.0.1", "localhost")


class ReportHandler(http.server.BaseHTTPRequestHandler):
    """Answers every GET of `/` with a new page; other paths do not exist."""

    timeout = IDLE_SECONDS
    server: ReportServer

    def do_GET(self) -> None:
        """Send the page, or an error."""
        # A page of another site, whose name resolves to this machine, has the name of its site.
        host = self.headers.get("Host", "").partition(":")[0]
        if host.lower() not in HOSTS:
            self.send_error(http.HTTPStatus.FORBIDDEN, "unknown Host: use 127.0.0.1 or localhost")
            return
        if self.path != "/":
            self.send_error(404)
            return
        status = http.HTTPStatus.OK
        subtype = "html"
        try:
            page = self.server.render()
        except NoRecordError as error:
            status = http.HTTPStatus.SERVICE_UNAVAILABLE
            subtype = "plain"
            page = f"{WAITING}: {format_error(error)}".encode()
        except (ValueError, OSError) as error:  # e.g., a damaged record
            status = http.HTTPStatus.INTERNAL_SERVER_ERROR
            subtype = "plain"
            page = f"error: {format_error(error)}".encode()
        self.send_response(status)
        self.send_header("Content-Type", f"text/{subtype}; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        if subtype == "plain":
            self.send_header("Refresh", str(REFRESH_SECONDS))  # as in the head of a page
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: object) -> None:
        """Ignore the message: requests are not logged."""


class ReportServer(http.server.ThreadingHTTPServer):
    """HTTP server of the report on some runs, for this machine only."""

    daemon_threads = True

    def __init__(self, port: int, runs: Sequence[Path], verify: bool) -> None:
        super().__init__(("127.0.0.1", port), ReportHandler)
        self._runs = runs
        self._verify = verify

    def render(self) -> bytes:
        """Return a new page. Raises ValueError or OSError if a run cannot be read."""
        facts = collect_facts(self._runs, self._verify)
        page = render_page(facts, REFRESH_SECONDS)
        return page.encode()


def run(args: argparse.Namespace) -> None:
    """Write the page, or serve it until the process is interrupted."""
    try:
        facts = collect_facts(args.runs, args.verify)  # reports errors before a server starts
    except NoRecordError as error:
        # A run in progress writes its first record when it begins to train.
        if args.serve is None:
            raise
        print_line(f"{WAITING}: {format_error(error)}")
    if args.serve is not None:
        with ReportServer(args.serve, args.runs, args.verify) as server:
            print_line(f"report: http://127.0.0.1:{server.server_port} (Ctrl-C ends it)")
            server.serve_forever()
    output = args.output or args.runs[0] / "report.html"
    write_durably(output, render_page(facts).encode())
    print_line(f"report: {output}")
