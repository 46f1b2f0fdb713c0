"""`ponente dashboard`: a store's pages as they are now, for a browser on this machine."""

from __future__ import annotations

import json
import os
import secrets

from pipeline.cli.context import say
from pipeline.cli.options import UsageParser, verb_parser
from pipeline.errors import InputError
from pipeline.pages.server import Server, is_loopback
from pipeline.store import storage

_PORT = 7878


def run(arguments: list[str]) -> int:
    """Serve until interrupted."""
    given = _parser().parse_args(arguments)
    server = serve(given.store, given.host, given.port)
    store = storage.normalise(given.store)
    text = f"dashboard of {store}: {server.url} (read-only; Ctrl-C ends it)"
    about = {"format": 1, "store": store, "url": server.url}
    say(json.dumps(about) if given.json else text)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 0
    finally:
        server.server_close()
    return 0


def serve(store: str, host: str = "127.0.0.1", port: int = 0) -> Server:
    """The server of a store, which listens; see `Server`. Raises `InputError` for no store."""
    from steps.pages.live import LivePages
    from steps.pages.page import script

    prefix = storage.normalise(store)
    if not storage.entries(prefix):
        raise InputError(f"dashboard: expected a store with runs, found nothing in {prefix}")
    token = "" if is_loopback(host) else secrets.token_urlsafe(24)
    return Server((host, port), LivePages(prefix), [script("chart.js")], token)


def _parser() -> UsageParser:
    made = verb_parser("dashboard", __doc__)
    default = os.environ.get("PONENTE_PREFIX", "./runs")
    about = "path, gs://bucket/dir or s3://bucket/dir; else PONENTE_PREFIX, else ./runs"
    made.add_argument("store", nargs="?", default=default, help=about)
    made.add_argument("--json", action="store_true", help="print the address as a JSON object")
    made.add_argument("--port", type=int, default=_PORT, help=f"0 for a free one ({_PORT})")
    made.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on; another than this machine's own needs the token in the link",
    )
    return made
