"""`waystation placement`: a plan, its odds, and hosts from a file."""

from pathlib import Path

import pytest

from waystation.memory import place, recovery_probability


def test_the_whole_output(script) -> None:
    outcome = script("placement", "--hosts", "7", "--copies", "3")
    assert (outcome.out, outcome.err, outcome.code) == (
        "7 hosts, 3 copies of each shard\n"
        "in a group, every host keeps the shards of all its members\n"
        "in a ring, every host keeps its own shard and those of the 2 members before it\n"
        "\n"
        "group     hosts\n"
        "0         0 1 2\n"
        "1 (ring)  3 4 5 6\n"
        "\n"
        "hosts lost at once  every shard has a copy left\n"
        "1                                        always\n"
        "2                                        always\n"
        "3                                      85.7143%\n"
        "4                                      51.4286%\n"
        "5                                         never\n"
        "6                                         never\n",
        "",
        0,
    )


def test_hosts_in_order_share_domains(run) -> None:
    outcome = run("placement", "--hosts", "8", "--hosts-per-domain", "4")
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert lines[0] == "8 hosts, 2 copies of each shard, 2 failure domains"
    assert "the copies of every shard are in 2 domains" in lines
    assert "0      0 4    domain0 domain1" in lines
    table = lines[lines.index("domains lost at once  every shard has a copy left") :]
    assert [line.split() for line in table[1:]] == [["1", "always"], ["2", "never"]]


def test_hosts_and_domains_from_a_file(tmp_path: Path, run) -> None:
    path = tmp_path / "hosts"
    path.write_text("# name domain\nnode-a rack1\nnode-b rack1  # new\n\nnode-c rack2\nnode-d rack3\n")
    outcome = run("placement", "--domains", path, "--json")
    assert outcome.code == 0
    document = outcome.document
    assert document["hosts"] == ["node-a", "node-b", "node-c", "node-d"]
    assert document["domains"] == ["rack1", "rack1", "rack2", "rack3"]
    assert document["least_domains"] == 2
    assert sorted(map(sorted, document["holders"].values())) == sorted(
        sorted(group) for group in document["groups"] for _ in group
    )
    assert document["lost_domains"][0] == {"lost": 1, "recovered": 1.0, "is_exact": True}
    text = run("placement", "--domains", path, "--hosts", "4").out
    assert "node-c" in text


def test_the_document_holds_the_odds(run) -> None:
    document = run("placement", "--hosts", "16", "--copies", "2", "--json").document
    assert [row["lost"] for row in document["lost_hosts"]] == [1, 2, 3, 4]
    expected = [float(recovery_probability(place(16, 2), lost)) for lost in (1, 2, 3, 4)]
    assert [row["recovered"] for row in document["lost_hosts"]] == expected
    assert (document["domains"], document["least_domains"], document["lost_domains"]) == (None, None, [])


def test_a_large_plan_is_cut_short_for_people(run) -> None:
    outcome = run("placement", "--hosts", "4000", "--hosts-per-domain", "10")
    assert "and 1,980 more groups; --json has all" in outcome.out
    assert "> 99.9" not in outcome.out.split("domains lost")[0]
    assert "at least 9" in outcome.out
    assert len(outcome.out.splitlines()) < 50


def test_certainty_is_never_a_matter_of_rounding(run) -> None:
    outcome = run("placement", "--hosts", "4000", "--copies", "3")
    assert [line.split(maxsplit=1)[1] for line in outcome.out.splitlines()[-6:]][:3] == [
        "always",
        "always",
        "> 99.9999%",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say how many hosts there are with --hosts, or name them in a file with --domains"),
        (
            ["--hosts", "3", "--copies", "4"],
            "4 copies of each shard need as many hosts, and there are 3; ask for 1 to 3 copies, or for more",
        ),
        (["--domains", "FILE", "--hosts", "3"], "names 2 hosts, and --hosts says 3; leave --hosts out"),
        (
            ["--domains", "FILE", "--hosts-per-domain", "2"],
            "give only one of --domains and --hosts-per-domain",
        ),
        (["--domains", "absent"], "the domains cannot be read from 'absent': No such file or directory"),
        (["--domains", "ODD"], "line 2 of '[DIR]/odd' is not a host and its domain: 'b'"),
        (["--domains", "TWICE"], "line 2 of '[DIR]/twice' names the host 'a' again"),
        (["--domains", "BINARY"], "the domains cannot be read from '[DIR]/binary': it is not text"),
    ],
)
def test_wrong_calls(arguments: list[str], message: str, tmp_path: Path, run) -> None:
    contents = {"FILE": b"a 1\nb 2\n", "ODD": b"a 1\nb\n", "TWICE": b"a 1\na 2\n", "BINARY": b"\xff\xfe\x00"}
    for name, content in contents.items():
        (tmp_path / name.lower()).write_bytes(content)
    places = {name: str(tmp_path / name.lower()) for name in contents}
    outcome = run("placement", *[places.get(argument, argument) for argument in arguments])
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err
