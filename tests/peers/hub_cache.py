"""Compares what `phalanx fetch` leaves with what the Hub's own client expects.

usage: hub_cache.py PHALANX MODEL_DIRECTORY

Serves the directory as a model and as a data set of a Hub on loopback, fetches both into a new cache, and asks huggingface_hub, offline, for
the same repositories: it must find the same folder with the same files. Exits with 77 without huggingface_hub.
"""
import hashlib
import http.server
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import urllib.parse

try:
    from huggingface_hub import scan_cache_dir, snapshot_download
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def sibling(root, path):
    """An entry of the list of files: large files by SHA-256, others by git's hash."""
    content = path.read_bytes()
    entry = {"rfilename": str(path.relative_to(root)), "size": len(content),
             "blobId": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()}
    if path.suffix == ".safetensors":
        entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry


def handler(root):
    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            path = urllib.parse.unquote(self.path.partition("?")[0])
            if path.endswith("/revision/main"):
                files = [sibling(root, path) for path in sorted(root.rglob("*")) if path.is_file()]
                body = json.dumps({"sha": COMMIT, "siblings": files}).encode()
            else:
                body = (root / path.partition(f"/resolve/{COMMIT}/")[2]).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    return Hub


def main():
    binary, root = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler(root))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_CACHE": cache}
        for kind, flags in [("model", []), ("dataset", ["--dataset"])]:
            subprocess.run([binary, "fetch", *flags, "owner/name"], env=env, check=True)
            folder = pathlib.Path(snapshot_download("owner/name", repo_type=kind, cache_dir=cache, local_files_only=True))
            served = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
            found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
            assert found == served, (sorted(found), sorted(served))
            print(f"{kind}: {len(found)} files are those that huggingface_hub finds in {folder.relative_to(cache)}")
        report = scan_cache_dir(cache)
        assert not report.warnings, report.warnings
        assert {repo.repo_type for repo in report.repos} == {"model", "dataset"}


main()
