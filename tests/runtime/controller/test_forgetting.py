"""Programs and functions that nobody needs any more are forgotten, never under a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from tests.runtime.controller.world import World, error_of, pipeline, step

from waystation.runtime.controller import Dispatch
from waystation.runtime.ir import Compute, Program


def numbered(program: Program, number: int) -> Program:
    """A program that no other is, of functions that only such programs call."""
    nodes = tuple(
        replace(node, function=f"{node.function} {number}") if isinstance(node, Compute) else node
        for node in program.nodes
    )
    return replace(program, name=f"{program.name} {number}", nodes=nodes)


def held(world: World) -> tuple[int, int, int, int]:
    """Programs, what they came to, functions, and lists of hosts."""
    programs = world.controller.programs
    lists = sum(map(len, world.lists.values()))
    return programs.installed_count, programs.lowered_count, programs.function_count, lists


def test_nothing_is_left_of_programs_that_were_forgotten_as_soon_as_they_ran() -> None:
    world = World()
    client, slices = world.client("x", "a", "b")
    argument = world.put(client, slices[0])
    for number in range(50):
        program = numbered(pipeline(), number)
        made = world.call(client, program, slices, argument)
        world.controller.programs.forget(world.installed[program], client)
        assert held(world)[0] == 1  # while it runs, and is compiled
        world.run()
        assert error_of(world, client, made) is None
        assert held(world) == (0, 0, 0, 0)


def test_what_two_clients_have_installed_stays_until_both_have_forgotten_it() -> None:
    world = World()
    (first, slices), (second, others) = world.client("x"), world.client("y")
    program = step()
    for client, on in ((first, slices), (second, others)):
        world.call(client, program, on, world.put(client, *on))
    world.run()
    assert held(world)[:3] == (1, 1, 1)
    world.controller.programs.forget(world.installed[program], first)
    world.controller.programs.forget(world.installed[program], first)  # which it does not hold any more
    assert held(world)[0] == 1
    world.controller.drop_client(second)
    world.run()
    assert held(world) == (0, 0, 0, 0)


def test_what_was_used_least_recently_makes_room_and_is_made_again() -> None:
    world = World(most_lowered=4)
    client, slices = world.client("x")
    argument = world.put(client, *slices)
    programs = [numbered(step(), number) for number in range(6)]
    for program in (*programs, programs[0], programs[5]):
        made = world.call(client, program, slices, argument)
        world.run()
        assert error_of(world, client, made) is None
    installed, lowered, _, lists = held(world)
    assert (installed, lowered) == (6, 4)
    assert lists == 2 * 4  # each island has two hosts
    # As long as runs use all that there is, there is more of it.
    for program in programs:
        world.call(client, program, slices, argument)
    assert held(world)[1] == 6
    world.run()
    world.call(client, programs[0], slices, argument)
    world.call(client, numbered(step(), 6), slices, argument)
    world.run()
    assert held(world)[1] == 4


@pytest.mark.share(4)
@pytest.mark.parametrize("seed", range(40))
def test_random_programs_losses_and_clients(seed: int) -> None:
    world = World(seed, most_lowered=3)
    chance = world.chance
    for round_number in range(6):
        client, slices = world.client(f"client {round_number}", "a", "b")
        arguments = [world.put(client, slices[0]) for _ in range(2)]
        known: Counter[str] = Counter()
        for _ in range(30):
            program = numbered(pipeline() if chance.random() < 0.5 else step(), chance.randrange(6))
            on = slices if len(program.slices) == 2 else slices[:1]
            world.call(client, program, on, chance.choice(arguments))
            known[world.installed[program]] += 1
            for _ in range(chance.randrange(4)):
                world.step(fails=0.05)
            if chance.random() < 0.4:
                forgotten = chance.choice(sorted(known.elements()))
                known[forgotten] -= 1
                world.controller.programs.forget(forgotten, client)
            if chance.random() < 0.03:
                island = chance.choice("ab")
                world.lose(island)
                world.controller.rebuilt(island)
        if chance.random() < 0.5:
            world.run(fails=0.05)
        world.controller.drop_client(client)
    world.run()
    assert held(world) == (0, 0, 0, 0)


def test_functions_stay_with_the_programs_that_call_them() -> None:
    world = World()
    client, slices = world.client("x")
    programs = world.controller.programs
    programs.functions.hold("f0", client)
    programs.functions.set("f0", b"code")
    fingerprint = world.controller.install(client, step(), Dispatch.PARALLEL)
    programs.functions.release("f0", client)
    assert programs.functions.get("f0") == b"code"
    made = world.call(client, step(), slices, world.put(client, *slices))
    programs.forget(fingerprint, client)
    programs.forget(fingerprint, client)
    assert programs.functions.get("f0") == b"code"  # until the run has ended
    world.run()
    assert error_of(world, client, made) is None
    assert programs.functions.get("f0") is None
