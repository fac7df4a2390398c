"""Published models where they are published: in object stores, and behind HTTP. What they hold is compared
with what the package `safetensors` reads of the same files."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import traceback
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.torch
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.published import group_scenarios, load_peak, models
from tests.support import s3
from tests.support.peaks import in_own_process
from tests.support.programs import running
from tests.support.web import site

import waystation
import waystation.safetensors
from waystation import storage
from waystation.compat import safetensors as compat
from waystation.compat import safetensors_torch
from waystation.errors import (
    Conflict,
    Corrupt,
    InvalidInput,
    InvalidLayoutError,
    NotFound,
    PermissionDenied,
    Unavailable,
    Unsupported,
)
from waystation.safetensors import Divided, load, open, stream, verify_files, write_checksums  # noqa: A004

MIB = 1 << 20
SIGNATURE, PASSWORD = "4f5c3e-not-to-be-seen", "7a1d-not-to-be-seen"
QUERY = f"X-Amz-Credential=me&X-Amz-Signature={SIGNATURE}"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model of every dtype in three files with an index, and `whole.safetensors`."""
    tensors = models.every_dtype()
    names = list(tensors)
    directory = tmp_path / "model"
    directory.mkdir()
    weight_map = {}
    for number in range(3):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        own = {name: tensors[name] for name in names[number::3]}
        safetensors.torch.save_file(own, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(own, file)
    models.write_index(directory, weight_map)
    safetensors.torch.save_file(tensors, directory / "whole.safetensors")
    return directory


def upload(files: Path, location: str) -> str:
    """Puts the files of a directory to a location; returns that."""
    storage.of(location).write_files(
        [
            (f"{location}/{path.relative_to(files)}", path.read_bytes())
            for path in files.rglob("*")
            if path.is_file()
        ]
    )
    return location


@contextlib.contextmanager
def in_a_store(files: Path) -> Iterator[str]:
    own = s3.bucket()
    with own.context():
        yield upload(files, f"{own.location}/some/model")


@contextlib.contextmanager
def behind_http(files: Path) -> Iterator[str]:
    with site(files.parent) as served, served_in_time():
        yield f"{served.url}/{files.name}"


def served_in_time(deadline_s: float = s3.HANG_S) -> waystation.Context:
    context = waystation.Context()
    context.storage.deadline_s = deadline_s
    return context


PLACES: dict[str, Callable[[Path], contextlib.AbstractContextManager[str]]] = {
    "s3": in_a_store,
    "http": behind_http,
}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, directory: Path) -> Iterator[str]:
    """Where the model is, reached as the options in effect say."""
    with PLACES[request.param](directory) as location:
        yield location


def expected(directory: Path) -> dict[str, bytes]:
    """The bits of all tensors, as the package `safetensors` reads them."""
    read = safetensors.torch.load_file(directory / "whole.safetensors")
    return {name: models.bits(tensor) for name, tensor in read.items()}


def bits(tensors: dict[str, Any]) -> dict[str, bytes]:
    return {name: models.bits(tensor) for name, tensor in tensors.items()}


def files_at(place: str) -> list[str]:
    return [f"{place}/model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]


# ---- what is there -----------------------------------------------------------------------------


def test_a_file_several_files_and_an_index_are_loaded(place: str, directory: Path) -> None:
    for given in (f"{place}/whole.safetensors", files_at(place), f"{place}/model.safetensors.index.json"):
        assert bits(load(given, framework="torch")) == expected(directory)
    assert bits(dict(stream(files_at(place), framework="torch"))) == expected(directory)


def test_models_are_spread_from_where_they_are(place: str, directory: Path, tmp_path: Path) -> None:
    (directory / "config.json").write_text("{}")
    with contextlib.suppress(Unsupported):  # HTTP cannot be written to, and serves the directory itself
        storage.of(place).write_files([(f"{place}/config.json", b"{}")])
    given = (files_at(place), f"{place}/model.safetensors.index.json")
    for number, model in enumerate(given):
        done = waystation.safetensors.spread(model, [tmp_path / f"a{number}", tmp_path / f"b{number}"])
        assert bits(load(done.path, framework="torch")) == expected(directory)
        assert done.carried == (["config.json"] if number and place.startswith("s3") else [])
    mixed = [*files_at(place)[:2], directory / "model-00003-of-00003.safetensors"]
    with pytest.raises(Unsupported, match="several stores"):
        waystation.safetensors.spread(mixed, [tmp_path / "a", tmp_path / "b"])


def test_a_directory_of_a_store_is_listed(directory: Path) -> None:
    with in_a_store(directory) as place:
        for given in (place, place + "/"):
            tensors = open(given)
            assert tensors.files == files_at(place)
            assert bits(load(given, framework="torch")) == expected(directory)
        storage.remove_file(f"{place}/model.safetensors.index.json")
        storage.remove_file(f"{place}/whole.safetensors")
        assert open(place).files == files_at(place)
        storage.remove_file(files_at(place)[1])
        with pytest.raises(Corrupt, match="downloaded in part"):
            open(place)


def test_a_directory_behind_http_is_not_and_the_error_says_what_to_give(directory: Path) -> None:
    with behind_http(directory) as place:
        with pytest.raises(Unsupported, match=r"model\.safetensors\.index\.json"):
            open(place + "/")
        with pytest.raises(Corrupt, match="give the URL of the file"):
            open(place)
        with pytest.raises(NotFound, match="not there"):
            open(f"{place}/nothing.safetensors")


def test_names_are_what_they_are_in_a_store_and_encoded_in_a_url(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    names = ["a b", "100%", "q%20r", "x?y", "x#y", "a+b;c=d&e", "ü-木", "it's [1]{2}~^`|"]
    for number, name in enumerate(names):
        models.write_file(directory / f"{name}.safetensors", {"w": np.full(3, number)})
    for behind, encoded in ((in_a_store, str), (behind_http, urllib.parse.quote)):
        with behind(directory) as place:
            for number, name in enumerate(names):
                (loaded,) = load(f"{place}/{encoded(name)}.safetensors", framework="numpy").values()
                assert loaded.tolist() == [number] * 3


def test_tensors_and_parts_of_them_are_read(place: str, directory: Path) -> None:
    whole = safetensors.torch.load_file(directory / "whole.safetensors")
    with open(f"{place}/whole.safetensors", framework="torch") as tensors:
        assert set(tensors) == set(whole)
        for name, tensor in whole.items():
            assert models.bits(tensors.tensor(name)) == models.bits(tensor)
        assert torch.equal(tensors.slice("F32")[1:, 2], whole["F32"][1:, 2])
    with compat.safe_open(f"{place}/whole.safetensors", "pt") as opened:
        assert torch.equal(opened.get_slice("F64")[:, ::2], whole["F64"][:, ::2])
        assert torch.equal(opened.get_tensor("I64"), whole["I64"])
    found = safetensors_torch.load_file(f"{place}/whole.safetensors")
    assert bits(found) == expected(directory)


def test_each_process_of_jax_reads_what_its_devices_need(tmp_path: Path) -> None:
    values = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    (tmp_path / "model").mkdir()
    models.write_file(
        tmp_path / "model" / "whole.safetensors", {"w": values, "rest": np.zeros(8 * MIB, np.uint8)}
    )
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec(None, "x"))
    for behind in PLACES.values():
        found: list[Any] = []
        with behind(tmp_path / "model") as place:
            options = waystation.Context()
            options.storage.settings = storage_settings()
            options.array.loading.on_statistics = found.append
            with options:
                loaded = load(f"{place}/whole.safetensors", framework="jax", sharding=sharding, select=["w"])
        assert loaded["w"].sharding == sharding
        np.testing.assert_array_equal(loaded["w"], values)
        assert found[0].bytes_read < values.nbytes + MIB


def storage_settings() -> dict[str, str]:
    from waystation._options.in_effect import current_options

    return dict(current_options().storage.settings)


def test_files_of_several_stores_and_of_this_system_are_one_model(directory: Path) -> None:
    names = [path.name for path in sorted(directory.glob("model-*"))]
    with in_a_store(directory) as first, behind_http(directory) as second:
        own = s3.bucket()
        with own.context():
            files = [f"{first}/{names[0]}", f"{second}/{names[1]}", directory / names[2]]
            assert bits(load(files, framework="torch")) == expected(directory)


def test_options_are_those_in_effect_when_it_was_opened(directory: Path) -> None:
    own = s3.bucket()
    with own.context():
        location = upload(directory, f"{own.location}/model")
        tensors = open(f"{location}/whole.safetensors", framework="torch")
        of_index = open(location)
    assert torch.equal(tensors.tensor("F32"), models.every_dtype()["F32"])
    assert bits(load(tensors, framework="torch")) == expected(directory)
    assert bits(load(of_index, framework="torch")) == expected(directory)


def test_processes_of_torch_load_together(tmp_path: Path, directory: Path) -> None:
    own = s3.bucket()
    with own.context():
        location = upload(directory, f"{own.location}/model")
    for placement in (None, {"F32": Divided(0)}):
        with running(
            group_scenarios.load_from_store,
            own.endpoint,
            location,
            {"placement": placement},
            count=3,
            framework="torch",
            directory=tmp_path,
        ) as programs:
            for index, found in enumerate(programs.values()):
                tensors = {name: data for name, (_, _, data) in found}
                whole = expected(directory)
                if placement is not None:
                    whole["F32"] = whole["F32"][index * 16 : (index + 1) * 16]
                assert tensors == whole


def test_processes_of_torch_load_together_through_a_cache(tmp_path: Path, directory: Path) -> None:
    own = s3.bucket()
    with own.context():
        location = upload(directory, f"{own.location}/model")
    counts = []
    with s3.proxy(own.endpoint) as between:
        for _ in range(2):
            before = len(between.requests)
            with running(
                group_scenarios.load_through_cache,
                between.endpoint,
                location,
                str(tmp_path / "cache"),
                {"placement": None},
                count=2,
                framework="torch",
                directory=tmp_path,
            ) as programs:
                for found in programs.values():
                    tensors = {name: data for name, (_, _, data) in found}
                    assert tensors == expected(directory)
            counts.append(len(between.requests) - before)
    assert counts[1] < counts[0], "the data come from the cache"
    assert list((tmp_path / "cache").iterdir())


# ---- how it is read ----------------------------------------------------------------------------


def test_a_header_is_one_request_and_the_data_few(directory: Path) -> None:
    own = s3.bucket()
    with own.context():
        location = upload(directory, f"{own.location}/model")
    with s3.proxy(own.endpoint) as between, s3.context(between.endpoint):
        open(files_at(location))
        assert [(method, path.rpartition("/")[2]) for method, path in sorted(between.requests)] == [
            ("GET", path.rpartition("/")[2]) for path in files_at(location)
        ]
        between.requests.clear()
        load(files_at(location), framework="torch")
        assert len(between.requests) == 7, "three headers, one look for checksums, three files"


def test_a_load_takes_no_more_memory_than_from_a_disk(tmp_path: Path) -> None:
    arrays = {f"w{number}": np.full((512, 512), number, np.float32) for number in range(60)}
    arrays["large"] = np.ones((1 << 11, 1 << 11), np.float32)
    models.write_set(tmp_path / "model", arrays, 2)
    own = s3.bucket()
    with own.context():
        location = upload(tmp_path / "model", f"{own.location}/model")
    for framework in ("torch", "jax"):
        arguments = own.endpoint, location, framework, 32 * MIB
        held, extra = in_own_process(load_peak.from_store, *arguments, directory=tmp_path)
        assert held == 76 * MIB
        assert extra < 40 * MIB


def test_nothing_of_a_store_is_mapped(place: str) -> None:
    with pytest.raises(Unsupported, match="load without mmap"):
        load(f"{place}/whole.safetensors", framework="numpy", select=["F32"], mmap=True)


def test_checksums_beside_the_files_are_used(directory: Path) -> None:
    write_checksums(directory / "whole.safetensors")
    for behind in PLACES.values():
        with behind(directory) as place:
            file = f"{place}/whole.safetensors"
            assert bits(load(file, framework="torch", verify=True)) == expected(directory)
            assert verify_files(file) == []
            with pytest.raises(InvalidInput, match="no checksums"):
                load(files_at(place), framework="torch", verify=True)
            with pytest.raises(Unsupported, match="before it is uploaded"):
                write_checksums(file)
    content = bytearray((directory / "whole.safetensors").read_bytes())
    content[-1] ^= 1
    (directory / "whole.safetensors").write_bytes(content)
    for behind in PLACES.values():
        with behind(directory) as place:
            file = f"{place}/whole.safetensors"
            with pytest.raises(Corrupt, match="checksum"):
                load(file, framework="torch")
            (damaged,) = verify_files(file)
            assert damaged.path == file


def test_requests_that_fail_are_made_again(directory: Path) -> None:
    own = s3.bucket()
    with own.context():
        location = upload(directory, f"{own.location}/model")
    for failure in (s3.REFUSE, s3.LOSE_ANSWER):

        def break_some(number: int, failure: str = failure) -> str:
            return s3.PASS if number % 3 else failure

        with s3.proxy(own.endpoint, break_some) as between, s3.context(between.endpoint):
            assert bits(load(location, framework="torch")) == expected(directory)


# ---- what changes, and what is cut off ---------------------------------------------------------


def test_a_file_that_was_replaced_since_it_was_opened_is_a_conflict(place: str, directory: Path) -> None:
    name = "whole.safetensors"
    tensors = open(f"{place}/{name}", framework="torch")
    content = bytearray((directory / name).read_bytes())
    content[-1] ^= 1
    (directory / name).write_bytes(content)
    if place.startswith("s3"):
        storage.of(place).write_files([(f"{place}/{name}", bytes(content))])
    for read in (lambda: tensors.tensor("F32"), lambda: load(tensors, framework="torch")):
        with pytest.raises(Conflict):
            read()
    assert load(f"{place}/{name}", framework="torch").keys() == models.every_dtype().keys()


@pytest.mark.parametrize("sends_tags", [True, False])
def test_a_file_that_is_replaced_between_small_tensors_is_a_conflict(
    tmp_path: Path, sends_tags: bool
) -> None:
    path = tmp_path / "model.safetensors"

    def write(value: int) -> None:
        models.write_file(path, {name: np.full(50_000, value, np.float32) for name in "abc"})
        os.utime(path, (10**9 + value, 10**9 + value))

    write(1)
    with site(tmp_path) as served, served_in_time():
        served.manners.sends_tags = sends_tags
        tensors = open(f"{served.url}/model.safetensors")
        for name in "abc":
            assert (tensors.tensor(name) == 1).all()
        write(2)
        for name in "abc":  # the first is in what came with the header
            with pytest.raises(Conflict):
                tensors.tensor(name)


@pytest.mark.parametrize("tags", ["strong", "weak", "none"])
def test_a_file_that_is_replaced_between_header_and_data_is_read_anew(tmp_path: Path, tags: str) -> None:
    path = tmp_path / "model.safetensors"

    def write(value: int) -> None:
        models.write_file(path, {"a": np.full(300_000, value, np.float32)})
        os.utime(path, (10**9 + value, 10**9 + value))

    def replace(*_: object) -> None:
        if len(served.requests) == 2:  # after the header
            write(2)

    write(1)
    with site(tmp_path) as served, served_in_time():
        served.manners.before = replace
        served.manners.sends_tags = tags != "none"
        served.manners.tag_prefix = "W/" if tags == "weak" else ""
        (loaded,) = load(f"{served.url}/model.safetensors", framework="numpy").values()
    assert (loaded == 2).all()


def test_a_file_that_is_always_another_one_is_a_conflict(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    def change(*_: object) -> None:
        models.write_file(path, {"a": np.full(300_000, len(served.requests), np.float32)})

    models.write_file(path, {"a": np.zeros(300_000, np.float32)})
    with site(tmp_path) as served, served_in_time():
        served.manners.before = change
        with pytest.raises(Conflict):
            load(f"{served.url}/model.safetensors", framework="numpy")


def test_a_server_without_ranges_is_told(directory: Path) -> None:
    models.write_file(directory / "large.safetensors", {"a": np.zeros(300_000)})
    with site(directory, sends_ranges=False) as served, served_in_time():
        with pytest.raises(Unsupported, match="ignores ranges"):
            open(f"{served.url}/large.safetensors")
        tensors = open(files_at(served.url), framework="torch")  # headers that come with the whole file
        assert tensors.keys() == models.every_dtype().keys()
        with pytest.raises(Unsupported, match="ignores ranges"):
            load(tensors, framework="torch")
        found = open(f"{served.url}/model.safetensors.index.json").files
        assert found == files_at(served.url)


def test_a_server_that_cuts_answers_off_is_unavailable_in_the_end(tmp_path: Path) -> None:
    models.write_file(tmp_path / "model.safetensors", {"a": np.arange(4 * MIB, dtype=np.uint8)})
    with site(tmp_path) as served, served_in_time(2.0):
        tensors = open(f"{served.url}/model.safetensors")
        served.manners.sent_bytes = 1000
        with pytest.raises(Unavailable):
            load(tensors, framework="numpy")
        with pytest.raises(Unavailable):
            open(f"{served.url}/model.safetensors")


def test_an_answer_may_take_longer_than_the_deadline_as_long_as_it_goes_on(tmp_path: Path) -> None:
    arrays = {"a": np.arange(7 * MIB, dtype=np.uint8)}
    models.write_file(tmp_path / "model.safetensors", arrays)
    with site(tmp_path) as served, served_in_time(3.0):
        tensors = open(f"{served.url}/model.safetensors")
        served.manners.pause_s = 0.6
        np.testing.assert_array_equal(load(tensors, framework="numpy")["a"], arrays["a"])


def test_a_file_that_is_shorter_than_its_header_says_is_corrupt(directory: Path) -> None:
    path = directory / "whole.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    for behind in PLACES.values():
        with behind(directory) as place, pytest.raises(Corrupt):
            load(f"{place}/whole.safetensors", framework="torch")


def test_redirects_are_followed(directory: Path) -> None:
    with site(directory) as served, served_in_time():
        found = load(f"{served.url}/moved/whole.safetensors", framework="torch")
        assert bits(found) == expected(directory)


# ---- who may read it ---------------------------------------------------------------------------


def test_a_signature_is_used_and_never_seen(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with site(directory, query=QUERY) as served, served_in_time(5.0):
        url, index = (
            f"{served.url}/{name}?{QUERY}" for name in ("whole.safetensors", "model.safetensors.index.json")
        )
        statistics: list[Any] = []
        options = served_in_time()
        options.array.loading.on_statistics = statistics.append
        with options:
            assert bits(load(url, framework="torch")) == expected(directory)
        assert bits(load(index, framework="torch")) == expected(directory)
        tensors = open(url, framework="torch")
        assert bits(load(tensors.files, framework="torch")) == expected(directory)
        with waystation.Context(checkpoint_layout="auto"):
            assert waystation.load(url).keys() == models.every_dtype().keys()
        shown = [repr(tensors), *tensors.files, repr(statistics)]
        with pytest.raises(RuntimeError, match="do not have the same tensors") as caught:
            safetensors_torch.load_model(torch.nn.Linear(2, 2), url)
        shown.append(str(caught.value))
        served.manners.query = "another"
        for call in (
            lambda: load(url, framework="torch"),
            lambda: load(tensors, framework="torch"),
            lambda: load(url.replace("whole", "missing"), framework="torch"),
            lambda: safetensors_torch.load_model(torch.nn.Linear(2, 2), url),
            lambda: waystation.load(url),
            lambda: waystation.save(url, {"a": 1}),
            lambda: waystation.delete(url),
            lambda: waystation.safetensors.save(url, {"a": np.ones(1)}),
            lambda: load(Path(url), framework="torch"),
            lambda: load(url.replace("/whole", "/a%2Fb"), framework="torch"),
            lambda: load(url.replace("http://", "htp://"), framework="torch"),
            lambda: load(url.replace("http://", f"http://me:{PASSWORD}@"), framework="torch"),
            lambda: compat.safe_open(url, "pt"),
        ):
            with pytest.raises(waystation.errors.WaystationError) as raised:
                call()
            shown += [str(raised.value), repr(raised.value), repr(raised.value.context)]
            shown += traceback.format_exception(raised.value)
            shown.append(repr(pickle.loads(pickle.dumps(raised.value))))
        assert any("check the credentials" in text for text in shown)
        assert not any("PUT" in method or "DELETE" in method for method, *_ in served.requests)
    text = "\n".join([*shown, caplog.text])
    assert SIGNATURE not in text
    assert PASSWORD not in text


def test_many_signed_files_have_signatures_of_their_own(tmp_path: Path) -> None:
    arrays = models.numbers(80)
    for name, array in arrays.items():
        models.write_file(tmp_path / f"{name}.safetensors", {name: array})
    with site(tmp_path) as served, served_in_time():
        urls = [f"{served.url}/{name}.safetensors?sig={number}" for number, name in enumerate(arrays)]
        loaded = load(urls, framework="numpy")
    assert {name: array.tobytes() for name, array in loaded.items()} == {
        name: array.tobytes() for name, array in arrays.items()
    }


def test_a_signature_that_another_process_has_seen_is_not_known(directory: Path) -> None:
    with pytest.raises(InvalidInput, match="give the URL itself"):
        open("https+query-00000000://host/whole.safetensors")


@pytest.mark.parametrize("is_listed", [True, False])
def test_what_is_public_is_read_without_credentials(directory: Path, is_listed: bool) -> None:
    own = s3.bucket()
    with own.context():
        location = upload(directory, f"{own.location}/model")
    own.publish(is_listed=is_listed)
    settings = {"aws_endpoint": own.endpoint, "aws_allow_http": "true", "skip_signature": "true"}
    options = waystation.Context()
    options.storage.settings = settings
    with options:
        for given in (f"{location}/model.safetensors.index.json", *([location] if is_listed else [])):
            assert bits(load(given, framework="torch")) == expected(directory)
        if not is_listed:
            with pytest.raises(PermissionDenied):
                load(location, framework="torch")


def test_settings_of_one_store_are_no_hindrance_to_another(directory: Path) -> None:
    with behind_http(directory) as place:
        with s3.context("http://127.0.0.1:1", azure_storage_account_name="me", skip_signature="true"):
            assert bits(load(files_at(place), framework="torch")) == expected(directory)
        with (
            s3.context("http://127.0.0.1:1", no_such_setting="1"),
            pytest.raises(InvalidInput, match="no_such"),
        ):
            load(files_at(place), framework="torch")


# ---- as checkpoints ----------------------------------------------------------------------------


def test_a_model_is_loaded_as_a_checkpoint(place: str, directory: Path) -> None:
    options = waystation.Context(checkpoint_layout="auto")
    options.storage.settings = storage_settings()
    with options:
        loaded = waystation.load(f"{place}/whole.safetensors")
        described = waystation.metadata(f"{place}/whole.safetensors")
    np.testing.assert_array_equal(loaded["F32"], models.every_dtype()["F32"].numpy())
    assert described.path == f"{place}/whole.safetensors"


def test_a_checkpoint_behind_http_is_loaded_and_not_written(tmp_path: Path) -> None:
    state = {"a": np.arange(300_000), "b": "text"}
    waystation.save(tmp_path / "run" / "12", state)
    with site(tmp_path) as served, served_in_time():
        path = f"{served.url}/run/12"
        loaded = waystation.load(path)
        np.testing.assert_array_equal(loaded["a"], state["a"])
        assert waystation.is_checkpoint(path)
        for overwrite in (False, True):
            with pytest.raises(Unsupported, match="nothing can be written"):
                waystation.save(path, state, overwrite=overwrite)
        with pytest.raises(Unsupported):
            waystation.delete(path)
        assert {method for method, *_ in served.requests} <= {"GET", "HEAD"}


def test_a_signed_url_is_no_checkpoint(directory: Path) -> None:
    with site(directory, query=QUERY) as served, served_in_time(5.0):
        for name in ("whole.safetensors", "missing"):
            with pytest.raises(InvalidLayoutError, match="the signature of one file") as caught:
                waystation.load(f"{served.url}/{name}?{QUERY}")
            assert "waystation.safetensors.load" in str(caught.value)
        served.manners.query = "another"  # as for a signature that has run out
        with pytest.raises(InvalidLayoutError, match="the signature of one file"):
            waystation.load(f"{served.url}/whole.safetensors?{QUERY}")


# ---- pointers of Git LFS -----------------------------------------------------------------------

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"


def test_pointers_of_git_lfs_are_told_wherever_they_lie(tmp_path: Path) -> None:
    model = tmp_path / "model"
    models.write_set(model, models.numbers(4), 2)
    (model / "model-00002-of-00002.safetensors").write_text(POINTER)
    pulled = tmp_path / "pulled"
    pulled.mkdir()
    (pulled / "model.safetensors").write_text(POINTER)
    for files, name in ((model, "model-00002-of-00002.safetensors"), (pulled, "model.safetensors")):
        for behind in (contextlib.nullcontext, *PLACES.values()):
            with behind(files) as place:
                asked = [f"{place}/{name}"] if behind is behind_http else [f"{place}/{name}", place]
                for given in asked:
                    with pytest.raises(Corrupt, match=r"a pointer of Git LFS.*git lfs pull") as caught:
                        open(given)
                    assert name in str(caught.value)


def test_an_index_that_is_a_pointer_is_told(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(POINTER)
    with pytest.raises(Corrupt, match="a pointer of Git LFS"):
        open(tmp_path)


def test_a_cache_of_hugging_face_with_a_pointer_in_it_is_told(tmp_path: Path) -> None:
    model = tmp_path / "models--a--b"
    snapshot = model / "snapshots" / ("0123456789" * 4)
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    (model / "blobs" / "1").write_text(POINTER)
    (snapshot / "model.safetensors").symlink_to("../../blobs/1")
    for given in (model, snapshot):
        with pytest.raises(Corrupt, match="a pointer of Git LFS"):
            open(given)
