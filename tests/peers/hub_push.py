#!/usr/bin/env python3
"""Compares what `phalanx push` and `hub_model_id` send to a Hub with what the Hub's own client sends for the same folder.

    python3 tests/peers/hub_push.py target/release/phalanx

A server of this machine takes the part of the Hub and of its storage, keeps what it gets, and hands the files out again: the client of Python then
downloads what Phalanx has uploaded. Needs huggingface_hub (written for 2.4; its own storage protocol is switched off, as not every server has it).
"""
import base64
import hashlib
import http.server
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import threading

BINARY = os.path.abspath(sys.argv[1])
PART = 3_000_000
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"
YAML = """model: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
  num_key_value_heads: 2, max_position_embeddings: 64}
tokenizer: bytes
datasets: [{path: text.txt, type: completion}]
sequence_len: 32
micro_batch_size: 2
max_steps: 5
output_dir: out
hub_model_id: me/trained
hub_private_repo: true
"""


class Hub(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    seen, stored, models = [], {}, {}

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", headers=()):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def handle_any(self):
        body, path = self.body(), self.path.split("?")[0]
        here = f"http://127.0.0.1:{self.server.server_port}"
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        shown = hashlib.sha256(body).hexdigest() if self.command == "PUT" else body.decode()
        if self.command in ("POST", "PUT"):
            Hub.seen.append((self.command, path, shown, has_token, self.headers.get("Content-Type")))
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}"
            if name in Hub.models:
                return self.answer(409, {"error": "it is there", "url": f"{here}/{name}"})
            # The word of clients since 1.3, and the one before, which the Hub still takes.
            Hub.models[name] = {"private": wanted.get("visibility") == "private" or wanted.get("private"), "files": {}}
            return self.answer(200, {"url": f"{here}/{name}", "name": name, "id": "1"})
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if "/preupload/" in path:
            mode = lambda f: "lfs" if f["path"].endswith(".safetensors") else "regular"
            files = [{"path": f["path"], "uploadMode": mode(f), "shouldIgnore": False} for f in json.loads(body)["files"]]
            return self.answer(200, {"files": files})
        if path.endswith("/info/lfs/objects/batch"):
            objects = []
            for wanted in json.loads(body)["objects"]:
                oid, size = wanted["oid"], wanted["size"]
                upload = {"href": f"{here}/storage/{oid}"}
                if size > PART:
                    parts = {str(i + 1): f"{here}/part/{oid}/{i + 1}" for i in range(-(-size // PART))}
                    upload = {"href": f"{here}/complete", "header": {"chunk_size": str(PART), **parts}}
                actions = {"upload": upload, "verify": {"href": f"{here}/verify"}}
                objects.append(wanted if oid in Hub.stored else {**wanted, "actions": actions})
            return self.answer(200, {"transfer": "basic", "objects": objects})
        if path.startswith("/storage/"):
            Hub.stored[path.split("/")[-1]] = body
            return self.answer(200)
        if path.startswith("/part/"):
            _, _, oid, n = path.split("/")
            Hub.stored.setdefault(oid + "-parts", {})[int(n)] = body
            return self.answer(200, headers=[("ETag", f'"{n}"')])
        if path == "/complete":
            wanted = json.loads(body)
            parts = Hub.stored.pop(wanted["oid"] + "-parts")
            Hub.stored[wanted["oid"]] = b"".join(parts[p["partNumber"]] for p in wanted["parts"])
            return self.answer(200, {})
        if path == "/verify":
            wanted = json.loads(body)
            content = Hub.stored[wanted["oid"]]
            right = hashlib.sha256(content).hexdigest() == wanted["oid"] and len(content) == wanted["size"]
            return self.answer(200 if right else 400, {})
        if "/commit/" in path:
            model = Hub.models[path.split("/api/models/")[1].split("/commit/")[0]]
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    model["files"][value["path"]] = base64.b64decode(value["content"])
                if entry["key"] == "lfsFile":
                    model["files"][value["path"]] = Hub.stored[value["oid"]]
            url = path.split("/api/models/")[1].split("/commit/")[0]
            return self.answer(200, {"commitUrl": f"{here}/{url}/commit/{'1' * 40}", "commitOid": "1" * 40, "pullRequestUrl": None})
        if path.startswith("/api/models/"):
            name = "/".join(path.split("/")[3:5])
            if name not in Hub.models:
                return self.answer(404, {"error": "not found"}, [("X-Error-Code", "RepoNotFound")])
            files = Hub.models[name]["files"].items()
            if "/tree/" in path:
                return self.answer(200, [{"type": "file", "path": f, "size": len(c), "oid": "0" * 40} for f, c in files])
            siblings = [{"rfilename": f, "size": len(c), "blobId": "0" * 40} for f, c in files]
            return self.answer(200, {"id": name, "modelId": name, "sha": "1" * 40, "siblings": siblings, "private": False, "tags": []})
        if "/resolve/" in path:
            name, rest = path[1:].split("/resolve/")
            content = Hub.models[name]["files"].get(rest.split("/", 1)[1])
            if content is None:
                return self.answer(404, {"error": "no such entry"}, [("X-Error-Code", "EntryNotFound")])
            headers = [("X-Repo-Commit", "1" * 40), ("ETag", '"' + hashlib.sha256(content).hexdigest() + '"')]
            return self.answer(200, content, headers)
        return self.answer(404, {"error": path})

    do_GET = do_HEAD = do_POST = do_PUT = handle_any


def requests_of(work):
    """The requests that change something, without what differs by intent: the words of a commit."""
    Hub.seen.clear()
    work()
    found = []
    for method, path, body, has_token, kind in Hub.seen:
        if method == "POST" and "ndjson" in (kind or ""):
            lines = [json.loads(line) for line in body.splitlines()]
            body = [sorted(lines[0]["value"])] + sorted(lines[1:], key=lambda line: line["value"]["path"])
        elif method == "POST":
            body = json.loads(body)
            for field, key in (("files", "path"), ("objects", "oid")):
                if field in body:
                    body[field].sort(key=lambda entry: entry[key])
        found.append((method, path.replace("by-python", "X").replace("by-phalanx", "X"), body, has_token))
    # Files may be uploaded in any order, or at the same time.
    return sorted(found, key=lambda request: json.dumps(request))


def main():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    work = pathlib.Path(tempfile.mkdtemp(prefix="hub-push-"))
    os.environ |= {"HF_ENDPOINT": endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(work / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    import huggingface_hub

    folder = work / "model"
    (folder / "part").mkdir(parents=True)
    draw = random.Random(0)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "README.md").write_text("# é\n")
    (folder / "empty.json").write_bytes(b"")
    (folder / "model.safetensors").write_bytes(draw.randbytes(2 * PART + 17))
    (folder / "part/adapter.safetensors").write_bytes(draw.randbytes(100_000))

    def python():
        api = huggingface_hub.HfApi()
        api.create_repo("me/by-python", private=True, exist_ok=True)
        api.upload_folder(repo_id="me/by-python", folder_path=folder)

    def phalanx():
        subprocess.run([BINARY, "push", str(folder), "me/by-phalanx", "--private"], check=True)

    found = {}
    for name, how in [("python", python), ("phalanx", phalanx)]:
        Hub.stored.clear()
        found[name] = requests_of(how)
    differing = []
    for method, path, body, has_token in found["phalanx"]:
        if path == "/api/repos/create":
            body = {**body, "name": "X", "visibility": "private"}
            del body["private"]
        twin = [r for r in found["python"] if r[:2] == (method, path)]
        twin = [(m, p, {**b, "name": "X"} if p == "/api/repos/create" else b, t) for m, p, b, t in twin]
        if (method, path, body) not in [r[:3] for r in twin]:
            differing.append((method, path, body, twin))
        # Python's client names its user to every address of its Hub; ours to storage never.
        assert has_token == (not path.startswith(("/storage", "/part/"))), (path, has_token)
    print(f"requests: {len(found['python'])} of huggingface_hub {huggingface_hub.__version__}, {len(found['phalanx'])} of Phalanx, {len(differing)} unlike")
    for what in differing:
        print("  unlike:", json.dumps(what)[:1500])
    same = Hub.models["me/by-python"] == Hub.models["me/by-phalanx"]
    print("models on the Hub equal:", same)

    (work / "text.txt").write_text("The hoplites hold the line. " * 400)
    (work / "job.yaml").write_text(YAML)
    subprocess.run([BINARY, "train", "job.yaml"], cwd=work, check=True)
    snapshot = pathlib.Path(huggingface_hub.snapshot_download("me/trained"))
    own = {p.name: p.read_bytes() for p in (work / "out/model").iterdir() if not p.name.startswith(".")}
    got = {p.name: p.read_bytes() for p in snapshot.iterdir()}
    print("what huggingface_hub downloads is the trained model:", own == got, [name for name in own if own[name] != got.get(name)] or sorted(got))
    sys.exit(0 if not differing and same and own == got and Hub.models["me/trained"]["private"] else 1)


if __name__ == "__main__":
    main()
