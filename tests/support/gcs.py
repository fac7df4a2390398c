"""A real server of Google Cloud Storage's JSON protocol on this machine, and a translator before it.

Programs reach Google Cloud Storage by its XML protocol, as the `object_store` crate does. Version 1.56
of fake-gcs-server answers reads of that protocol only. So the translator makes a request of the JSON protocol
from every other one: the condition of a write (`x-goog-if-generation-match`) becomes the parameter by which
the server compares and writes in one act, and an upload in parts becomes objects in a bucket of their own,
which are composed and then moved. Reads go through unchanged.

The server ignores the condition of a removal. There the translator compares first. It passes one request on
at a time, so both are one act, as they are at Google's.
"""

from __future__ import annotations

import functools
import http.client
import itertools
import json
import os
import secrets
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit
from xml.sax.saxutils import escape

import pytest
from tests.support import s3
from tests.support.programs import HANG_S
from tests.support.servers import serve

INSTALLED = Path(__file__).parents[2] / "target" / "fake-gcs-server"
PROGRAM = shutil.which(
    "fake-gcs-server", path=os.pathsep.join((os.fspath(INSTALLED), os.environ.get("PATH", os.defpath)))
)
# What the genuine Orbax reaches it with, see `tools/fake-gcs-server`.
PACKAGES = INSTALLED / "packages"
MISSING = "fake-gcs-server is not installed; 'make fake-gcs-server' does that where Go is"
LEAST_PART_BYTES = 5 << 20
# What a request that is passed on is asked with.
_PASSED = ("range", "if-match", "if-none-match")
_numbers = itertools.count()


class Bucket(s3.Bucket):
    """A bucket of its own.

    Attributes:
        location: `gs://bucket`.
        endpoint: Where its translator listens.
    """

    def __init__(self, server: Server) -> None:
        self._name = f"bucket-{os.getpid()}-{next(_numbers)}"
        self._server = server
        for each in (self._name, _parts_of(self._name)):
            server.ask("POST", "/storage/v1/b", json.dumps({"name": each}).encode())
        self.location = f"gs://{self._name}"
        self.endpoint = server.translator.endpoint

    def names(self) -> list[str]:
        """See `s3.Bucket`."""
        return sorted(self.sizes())

    def sizes(self) -> dict[str, int]:
        """The lengths of all objects, and of parts of uploads that were neither completed nor aborted."""
        listed = [
            json.loads(self._server.ask("GET", f"/storage/v1/b/{bucket}/o"))
            for bucket in (self._name, _parts_of(self._name))
        ]
        return {item["name"]: int(item["size"]) for found in listed for item in found.get("items", ())}

    def read(self, name: str) -> bytes:
        """The content of an object."""
        return self._server.ask("GET", f"{_path(self._name, name)}?alt=media")

    def write(self, name: str, content: bytes) -> None:
        """Puts another object in the place of one."""
        query = urlencode({"uploadType": "media", "name": name})
        self._server.ask("POST", f"/upload/storage/v1/b/{self._name}/o?{query}", content)

    def remove(self, name: str) -> None:
        """Removes an object."""
        self._server.ask("DELETE", _path(self._name, name))

    def settings(self, endpoint: str) -> dict[str, str]:
        """See `s3.Bucket`."""
        return settings(endpoint)


def settings(endpoint: str) -> dict[str, str]:
    """How the server at an address is reached; in capitals these are variables of the environment."""
    account = {"client_email": "", "private_key": "", "private_key_id": "", "disable_oauth": True}
    return {"google_base_url": endpoint, "google_service_account_key": json.dumps(account)}


def bucket() -> Bucket:
    """A new bucket; skips the test where no server is installed."""
    return Bucket(_server())


class Server:
    """The server of this process.

    Attributes:
        address: Where it listens, for those who know its own protocol.
        translator: What listens for the XML protocol.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.translator = Translator(address)

    def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The body of its answer to a request, which has to be met."""
        status, _, content = _ask(self.address, method, path, {"Content-Type": "application/json"}, body)
        assert status < http.client.BAD_REQUEST, (method, path, status, content)
        return content


def server() -> Server:
    """The server of this process; skips the test where none is installed."""
    return _server()


@functools.cache
def _server() -> Server:
    if PROGRAM is None:
        pytest.skip(MISSING)

    def options(port: int, _: Path) -> list[str]:
        address = f"127.0.0.1:{port}"
        told = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-public-host", address]
        # On a disk it would have no object whose name goes on in that of another one.
        return [*told, "-external-url", f"http://{address}", "-log-level", "error", "-backend", "memory"]

    address, _ = serve(PROGRAM, options)
    made = Server(address)
    made.translator.begin()
    return made


def _parts_of(bucket: str) -> str:
    """The bucket that has the parts of the uploads to a bucket."""
    return f"{bucket}-parts"


def _ask(address: str, method: str, path: str, headers: Mapping[str, str], body: bytes) -> s3.Answer:
    connection = http.client.HTTPConnection(address, timeout=HANG_S)
    try:
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.getheaders(), answer.read()
    finally:
        connection.close()


class Translator(s3.Proxy):
    """What makes requests of the JSON protocol from those of the XML protocol."""

    def __init__(self, address: str) -> None:
        super().__init__(f"http://{address}", lambda _: s3.PASS)
        self._address = address
        self._uploads: dict[str, tuple[str, str, dict[int, tuple[str, int]]]] = {}

    def begin(self) -> None:
        """Listens until this process ends."""
        self._thread.daemon = True
        self._thread.start()

    def ask(self, method: str, path: str, headers: Any, body: bytes) -> s3.Answer:
        """See `s3.Proxy`."""
        parsed = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(parsed.query, keep_blank_values=True).items()}
        bucket, _, name = (unquote(part) for part in parsed.path.removeprefix("/").partition("/"))
        if not name:
            return self._list(bucket, query)
        if method in ("GET", "HEAD"):
            passed = {key: value for key, value in headers.items() if key.lower() in _PASSED}
            return _ask(self._address, method, path, passed, body)
        if "uploads" in query:
            return self._begin_upload(bucket, name)
        if "uploadId" in query:
            return self._go_on(method, bucket, name, query, body)
        condition = headers.get("x-goog-if-generation-match")
        conditions = {} if condition is None else {"ifGenerationMatch": condition}
        if method == "DELETE":
            return self._remove(bucket, name, condition)
        source = headers.get("x-goog-copy-source")
        if source is not None:
            assert condition is None, "no copy of ours has one"
            return self._copy(*map(unquote, source.split("/", 1)), bucket, name)
        return self._insert(bucket, name, body, conditions)

    def _json(
        self, method: str, path: str, query: Mapping[str, str], body: bytes = b"", kind: str = ""
    ) -> s3.Answer:
        target = f"{path}?{urlencode(query)}" if query else path
        return _ask(self._address, method, target, {"Content-Type": kind} if kind else {}, body)

    def _insert(self, bucket: str, name: str, body: bytes, conditions: Mapping[str, str]) -> s3.Answer:
        query = {"uploadType": "media", "name": name, **conditions}
        kind = "application/octet-stream"
        return _without_body(self._json("POST", f"/upload/storage/v1/b/{quote(bucket)}/o", query, body, kind))

    def _remove(self, bucket: str, name: str, condition: str | None) -> s3.Answer:
        if condition is not None:
            found = self._json("GET", _path(bucket, name), {})
            if found[0] >= http.client.BAD_REQUEST:
                return found
            if json.loads(found[2])["generation"] != condition:
                return _refusal(http.client.PRECONDITION_FAILED, "PreconditionFailed")
        return self._json("DELETE", _path(bucket, name), {})

    def _copy(self, source: str, object_: str, bucket: str, name: str) -> s3.Answer:
        path = f"{_path(source, object_)}/rewriteTo/b/{quote(bucket)}/o/{quote(name, safe='')}"
        status, headers, content = self._json("POST", path, {}, b"{}", "application/json")
        if status >= http.client.BAD_REQUEST:
            return status, headers, content
        assert json.loads(content)["done"]
        return _of_object(json.loads(content)["resource"], "<CopyObjectResult/>")

    # ---- uploads in parts ----------------------------------------------------------------------

    def _begin_upload(self, bucket: str, name: str) -> s3.Answer:
        upload = secrets.token_hex(8)
        self._uploads[upload] = bucket, name, {}
        return _xml(
            f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
        )

    def _go_on(self, method: str, bucket: str, name: str, query: Mapping[str, str], body: bytes) -> s3.Answer:
        """Takes a part, completes the upload, or ends it."""
        upload = query["uploadId"]
        if self._uploads.get(upload, ("", ""))[:2] != (bucket, name):
            return _refusal(http.client.NOT_FOUND, "NoSuchUpload")
        if method == "PUT":
            return self._put_part(upload, int(query["partNumber"]), body)
        _, _, parts = self._uploads[upload]
        if method == "POST":
            answer = self._complete(upload, body)
            if answer[0] >= http.client.BAD_REQUEST:
                return answer
        else:
            answer = http.client.NO_CONTENT, [], b""
        del self._uploads[upload]
        for number in parts:
            self._json("DELETE", _path(_parts_of(bucket), f"{upload}/{number}"), {})
        return answer

    def _put_part(self, upload: str, number: int, body: bytes) -> s3.Answer:
        bucket, _, parts = self._uploads[upload]
        answer = self._insert(_parts_of(bucket), f"{upload}/{number}", body, {})
        tag = next((value for header, value in answer[1] if header == "ETag"), None)
        if tag is not None:
            parts[number] = tag, len(body)
        return answer

    def _complete(self, upload: str, body: bytes) -> s3.Answer:
        bucket, name, parts = self._uploads[upload]
        wanted = [
            (int(part.findtext("PartNumber") or 0), part.findtext("ETag"))
            for part in ElementTree.fromstring(body).iter("Part")
        ]
        numbers = [number for number, _ in wanted]
        if numbers != sorted({*numbers}):
            return _refusal(http.client.BAD_REQUEST, "InvalidPartOrder")
        if any(parts.get(number, ("", 0))[0] != tag for number, tag in wanted):
            return _refusal(http.client.BAD_REQUEST, "InvalidPart")
        if any(parts[number][1] < LEAST_PART_BYTES for number in numbers[:-1]):
            return _refusal(http.client.BAD_REQUEST, "EntityTooSmall")
        sources = [{"name": f"{upload}/{number}"} for number in numbers]
        composed = json.dumps({"sourceObjects": sources, "destination": {"name": upload}}).encode()
        own = _parts_of(bucket)
        path = f"{_path(own, upload)}/compose"
        status, headers, content = self._json("POST", path, {}, composed, "application/json")
        if status >= http.client.BAD_REQUEST:
            return status, headers, content
        status, headers, content = self._copy(own, upload, bucket, name)
        self._json("DELETE", _path(own, upload), {})
        if status >= http.client.BAD_REQUEST:
            return status, headers, content
        tag = escape(dict(headers)["ETag"])
        return (
            status,
            headers,
            _xml(f"<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>")[2],
        )

    # ---- listings ------------------------------------------------------------------------------

    def _list(self, bucket: str, query: Mapping[str, str]) -> s3.Answer:
        own = {"prefix": "prefix", "delimiter": "delimiter", "max-keys": "maxResults"}
        own |= {"continuation-token": "pageToken", "start-after": "startOffset"}
        given = {own[name]: value for name, value in query.items() if name in own}
        answer = self._json("GET", f"/storage/v1/b/{quote(bucket)}/o", given)
        if answer[0] >= http.client.BAD_REQUEST:
            return answer
        found = json.loads(answer[2])
        entries = [
            f"<Contents><Key>{_text(item['name'])}</Key><Size>{item['size']}</Size>"
            f"<LastModified>{item['updated']}</LastModified><ETag>{_text(item['etag'])}</ETag></Contents>"
            for item in found.get("items", ())
            if item["name"] != query.get("start-after")
        ]
        entries += [
            f"<CommonPrefixes><Prefix>{_text(prefix)}</Prefix></CommonPrefixes>"
            for prefix in found.get("prefixes", ())
        ]
        token = found.get("nextPageToken")
        if token:
            entries.append(f"<NextContinuationToken>{_text(token)}</NextContinuationToken>")
        return _xml(f"<ListBucketResult>{''.join(entries)}</ListBucketResult>")


def _path(bucket: str, name: str) -> str:
    return f"/storage/v1/b/{quote(bucket)}/o/{quote(name, safe='')}"


def _text(value: str) -> str:
    """As text of XML, in which a line's end would be another one otherwise."""
    return escape(value, {character: f"&#{ord(character)};" for character in '\r\n\t"'})


def _xml(content: str) -> s3.Answer:
    return http.client.OK, [("Content-Type", "application/xml")], content.encode()


def _refusal(status: int, code: str) -> s3.Answer:
    return status, [], f"<Error><Code>{code}</Code></Error>".encode()


def _without_body(answer: s3.Answer) -> s3.Answer:
    """The answer to a write: the version is in headers."""
    status, headers, content = answer
    if status >= http.client.BAD_REQUEST:
        return status, headers, content
    return _of_object(json.loads(content), "")


def _of_object(resource: Mapping[str, str], content: str) -> s3.Answer:
    headers = [("ETag", resource["etag"]), ("x-goog-generation", resource["generation"])]
    return http.client.OK, headers, content.encode()
