"""Writes a small seed corpus for every fuzz target, so that a short run starts past the frames."""

from __future__ import annotations

import struct
from pathlib import Path

PAYLOAD_BYTES = 4088
HEADERS = [
    b"{}",
    b'{"__metadata__":{"format":"pt","\\u00e9\\n":""}}',
    b'{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}',
    b'{"b":{"dtype":"BF16","shape":[],"data_offsets":[4,6]},'
    b' "a":{"data_offsets":[0,4],"shape":[8],"dtype":"F4"}}',
    b' {"\\ud83d\\ude00":{"dtype":"F8_E4M3FNUZ","shape":[0,7],"data_offsets":[0,0]}}  ',
]
INDEXES = [
    b'{"weight_map":{"a":"m.safetensors"}}',
    b'{"metadata":{"total_size":1.5e3,"x":[null,true,{}]},"weight_map":{"\\u00e9":"m-00001-of-00002.safetensors",'
    b'"b":"m-00002-of-00002.safetensors"}}',
]
RECORDS = [b'{"crc64":"ae8b14860a799888","record":123456789}\n', b"{}", b'{"version":1}']


def table(choice: int, magic: bytes, sections: list[tuple[int, bytes]]) -> bytes:
    """The input that stands for a table: which one, then its pages without checksums."""
    header = magic + struct.pack("<II", 1, len(sections))
    pages, next_page = b"", 1
    for entry_bytes, entries in sections:
        page_count = -(-len(entries) // entry_bytes // (PAYLOAD_BYTES // entry_bytes))
        header += struct.pack("<IIQQ", entry_bytes, 0, len(entries) // entry_bytes, next_page)
        pages += entries.ljust(page_count * PAYLOAD_BYTES, b"\0")
        next_page += page_count
    return bytes([choice]) + header.ljust(PAYLOAD_BYTES, b"\0") + pages


def tables() -> list[bytes]:
    """One table of each kind; the chunks hold a grid, two boxes, a partial box and two runs."""
    files = struct.pack("<IIIIQQQQ16x", 0, 0, 0, 0, 8192, 4096, 0, 0)
    arrays = b"".join(
        struct.pack("<IIIIQQQQ", *fields)
        for fields in [
            (0, 2, 16, 0, 0, 2, 0, 4),
            (1, 1, 8, 0, 2, 2, 4, 7),
            (3, 1, 8, 0, 4, 1, 11, 5),
            (2, 1, 8, 0, 5, 0, 16, 14),
        ]
    )
    chunks = b"".join(
        struct.pack("<IIQQ", 0, 0, 4096 + offset, length)
        for offset, length in [(0, 24), (24, 8), (32, 3), (35, 2), (37, 3)]
    )
    dims = struct.pack("<16Q", 4, 4, 3, 4, 5, 0, 5, 0, 3, 3, 2, 9, 2, 3, 2, 3)
    dims += struct.pack("<14Q", 7, 2, 2, 0, *(0, 0, 1, 4096, 0), *(3, 0, 0, 4098, 1))
    return [
        table(0, b"WSTFILES", [(64, files)]),
        table(1, b"WSTCHNKS", [(48, arrays), (24, chunks), (8, dims)]),
        table(2, b"WSTCKSUM", [(8, struct.pack("<3Q", 1, 2, 3))]),
    ]


def slots() -> list[bytes]:
    """A header of each state, a store's record, and a table of contents with a box of an array."""
    seeds = []
    for state in range(5):
        header = b"WSTMSLOT" + struct.pack("<IIQ16sQI", 1, state, 0, b"store", 1 << 24, 0)
        tenant = struct.pack("<I16s4Q", 3, b"run", 1, 100, 800, 1 << 20)
        tenant += struct.pack("<QQ16sQQII", 5 * (state in (2, 3)), 0, b"boot", 4, 77, 6, 0) + b"0/4"
        page = header + (tenant if state else b"")
        second = page[:16] + struct.pack("<Q", 1) + page[24:]
        seeds.append(b"\0" + page.ljust(PAYLOAD_BYTES, b"\0") + second.ljust(PAYLOAD_BYTES, b"\0"))
    record = struct.pack("<8sIIQ16s16s16sQQII", b"WSTSTORE", 1, 0, 0, b"a", b"b", b"c", 3, 1 << 24, 4, 2)
    entry = struct.pack("<IHBB8Q", 88, 3, 7, 2, 64, 32, 8, 4, 2, 0, 2, 4) + b"w/0float32".ljust(16, b"\0")
    return [*seeds, b"\1" + record.ljust(2 * PAYLOAD_BYTES, b"\0"), b"\2" + struct.pack("<Q", 1) + entry]


def files() -> list[bytes]:
    """Whole files, each after a byte that says that all of it was read."""
    data_bytes = [0, 0, 24, 6, 0]
    return [
        b"\xff" + len(header).to_bytes(8, "little") + header + bytes(nbytes)
        for header, nbytes in zip(HEADERS, data_bytes, strict=True)
    ]


def local_frames() -> list[bytes]:
    """A request, an answer, and a frame that claims more than there is."""
    bodies = [
        b'{"grant":{"shard":"0/2","epoch":1,"step":7,"contents_bytes":8,"data_bytes":9}}',
        b'{"refused":{"kind":"Fenced","message":"late","context":[["slot","3"]]}}',
        b'{"inventory":[{"slot":0,"state":"free","sequence":1,"tenant":null,"digest":null}]}',
    ]
    frames = [b"WSTA" + struct.pack("<I", len(body)) + body for body in bodies]
    return [*frames, b"".join(frames), b"WSTA" + struct.pack("<I", 1 << 16) + b"{"]


def peer_messages() -> list[bytes]:
    """A recovery as agents and a controller speak of it, each message alone and all in lines."""
    epoch = '{"number":2,"controller":1}'
    version = f'{{"epoch":{epoch},"step":5}}'
    key, copy = f'{{"version":{version},"shard":0}}', '{"digest":7,"shard_count":1,"sequence":3}'
    held = f'"copies":[[{key},{copy}]],"noted":[{{"version":{version},"manifest":9}}]'
    program = '{"token":4,"sequence":3,"owners":[0]}'
    to_agent = [
        f'{{"prepare":{{"epoch":{epoch}}}}}',
        f'{{"admit":{{"epoch":{epoch},"incarnation":0,"incarnations":[[1,6]],"noted":[],"program":null}}}}',
        f'{{"learn":{{"epoch":{epoch},"agent":1,"incarnation":6}}}}',
        f'{{"gather":{{"epoch":{epoch}}}}}',
        f'{{"restore":{{"epoch":{epoch},"attempt":1,"program":{program},"version":{version},'
        f'"shards":[{{"reader":0,"copy":{copy},"sources":[1,2]}}]}}}}',
        f'{{"train":{{"epoch":{epoch},"attempt":1,"revision":0,"program":{program},"is_continued":false,'
        f'"base":{{"version":{version},"shard_count":1}},"is_base_kept":true,"commits":[],"is_open":false,'
        f'"floor":0,"holders":[[0,1]]}}}}',
        f'{{"commit":{{"epoch":{epoch},"commit":{{"version":{version},"manifest":9}}}}}}',
    ]
    to_controller = [
        f'{{"report":{{"incarnation":0,"promised":{epoch},"program":{program},"incarnations":[],{held},'
        f'"trained":{epoch}}}}}',
        f'{{"inventory":{{"epoch":{epoch},"incarnation":0,{held},"fruitless":[[{version},1]],'
        f'"program":{program},"begun":4}}}}',
        f'{{"restored":{{"epoch":{epoch},"attempt":1,"is_loaded":true}}}}',
    ]
    to_peer = [
        f'{{"kept":{{"epoch":{epoch},"key":{key},"digest":7}}}}',
        f'{{"damaged":{{"epoch":{epoch},"key":{key}}}}}',
        f'{{"fetch":{{"epoch":{epoch},"attempt":1,"key":{key}}}}}',
    ]
    messages = [
        *(f'{{"to_agent":{message}}}' for message in to_agent),
        *(f'{{"to_controller":{{"controller":1,"message":{message}}}}}' for message in to_controller),
        *(f'{{"to_peer":{message}}}' for message in to_peer),
    ]
    return [message.encode() for message in [*messages, "\n".join(messages)]]


def main() -> None:
    """Writes the seeds where cargo-fuzz looks for them."""
    seeds_of_targets = {
        "safetensors_header": HEADERS,
        "safetensors_file": files(),
        "safetensors_index": INDEXES,
        "table": tables(),
        "sealed_json": RECORDS,
        "slot": slots(),
        "local_frame": local_frames(),
        "peer_message": peer_messages(),
        "block_message": [struct.pack("<6Q", 1, 2, 3, 4, 5, 1), struct.pack("<3Q", 8, 9, 10)],
    }
    for target, seeds in seeds_of_targets.items():
        directory = Path(__file__).parent / "corpus" / target
        directory.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(seeds):
            (directory / f"seed-{number}").write_bytes(seed)


if __name__ == "__main__":
    main()
