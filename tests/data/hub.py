"""A Hugging Face Hub on this machine, as far as its clients ask when they load a dataset or a tokenizer.

Usage: python -m tests.data.hub. Serves COMMITS, loads from them, and prints what was recorded as JSON.
"""

import hashlib
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

OLD, NEW = "a" * 40, "b" * 40
HEADS = {"main": OLD, "v1": OLD, OLD: OLD, NEW: NEW}


def _rows(word: str) -> bytes:
    return b"".join(json.dumps({"text": f"{word} {row}"}).encode() + b"\n" for row in range(60))


FILES = {OLD: {"train.jsonl": _rows("old")}, NEW: {"train.jsonl": _rows("new")}}


class Hub(BaseHTTPRequestHandler):
    """Answers for one repository: its files, their list and its newest commit."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kind, _, rest = unquote(urlsplit(self.path).path).partition("/me/set/")
        action, _, rest = rest.partition("/")
        revision, _, name = rest.partition("/")
        commit = HEADS.get(revision or "main")
        files = FILES.get(commit, {})
        headers, body = {"X-Repo-Commit": commit or ""}, None
        if action == "resolve":
            body = files.get(name)
            headers |= {"ETag": f'"{hashlib.sha256(body or b"").hexdigest()}"', "X-Error-Code": "EntryNotFound"}
        elif action in ("tree", "paths-info"):
            found = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
            body = json.dumps(found).encode()
        elif commit and self.path.startswith("/api/"):
            body = json.dumps(
                {
                    "id": "me/set",
                    "sha": HEADS["main"] if not revision else commit,
                    "tags": [],
                    "siblings": [{"rfilename": name} for name in files],
                }
            ).encode()
        self.send_response(404 if body is None else 200)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body or b"")

    do_HEAD = do_POST = do_GET


def main(folder: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(folder / "hf")}

    import datasets
    import huggingface_hub

    from mstrain.data import DataConfig, prepare
    from mstrain.data.tokenizers import load_tokenizer, train_bpe

    for number, commit in enumerate((OLD, NEW)):
        train_bpe(["some text"], 300 + number).save(folder)
        FILES[commit]["tokenizer.json"] = (folder / "tokenizer.json").read_bytes()

    def load(tokenizer: str, revision: str | None = None) -> list:
        config = DataConfig("hf", "me/set", revision=revision, cache_dir=str(folder / "cache"))
        corpus = prepare(config, tokenizer)
        return [corpus.revisions, corpus.tokenizer.decode(corpus.train.read())[:3], corpus.digest]

    found = {"first": load("me/set")}
    HEADS["main"] = NEW
    found |= {"moved": load("me/set"), "pinned": load("me/set@v1", "v1"), "bytes": load("bytes")}
    server.shutdown()
    server.server_close()
    huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    found |= {"offline": load("me/set"), "offline and pinned": load("me/set", NEW)}
    try:
        load("me/set", OLD)
    except ValueError as error:
        found["offline and another"] = str(error)
    assert load_tokenizer("bytes").revision is None
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
