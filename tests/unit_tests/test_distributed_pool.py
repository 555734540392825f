"""The pool of multi-process tests distinguishes results, failures, hangs and deaths."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="module")
def pool(separate_pool):
    return separate_pool


def summed(rank: int, world_size: int, value: int) -> tuple[int, int]:
    tensor = torch.tensor(value + rank)
    dist.all_reduce(tensor)
    return int(tensor), os.getpid()


def tensors(rank: int, world_size: int) -> torch.Tensor:
    return torch.full((2,), rank, dtype=torch.bfloat16)


def one_rank_raises(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("rank 1 is to blame")
    dist.barrier()


class Unpicklable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def raises_unpicklable(rank: int, world_size: int) -> None:
    raise Unpicklable("un", "picklable")


def one_rank_sleeps(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(600)


def install_and_restore_signal_handler(rank: int, world_size: int) -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, before)


def one_rank_dies(rank: int, world_size: int) -> None:
    if rank == 0:
        os._exit(7)


def a_neighbour_fails_before_the_death_is_seen(rank: int, world_size: int) -> None:
    if rank == 0:
        raise RuntimeError("connection closed by peer")
    time.sleep(0.5)
    os._exit(7)


def test_results_come_in_rank_order_from_persistent_processes(pool):
    first = pool.run(summed, 2, 10)
    assert [value for value, _ in first] == [21, 21]
    second = pool.run(summed, 3, 10)
    assert [value for value, _ in second] == [33, 33, 33]
    assert [pid for _, pid in first] == [pid for _, pid in second[:2]]
    assert os.getpid() not in {pid for _, pid in second}


def test_tensors_come_back(pool):
    results = pool.run(tensors, 2)
    assert [result.tolist() for result in results] == [[0.0, 0.0], [1.0, 1.0]]
    assert results[0].dtype == torch.bfloat16


def test_exception_comes_back_with_its_type_and_remote_traceback(pool):
    with pytest.raises(KeyError, match="rank 1 is to blame") as caught:
        pool.run(one_rank_raises, 2)
    assert "in one_rank_raises" in str(caught.value.__cause__)
    assert [value for value, _ in pool.run(summed, 2, 1)] == [3, 3]


def test_exception_that_cannot_be_pickled_comes_back_as_runtime_error(pool):
    with pytest.raises(RuntimeError, match="Unpicklable: unpicklable"):
        pool.run(raises_unpicklable, 1)


def test_hung_rank_fails_by_timeout_with_its_stack_and_the_pool_goes_on(pool):
    with pytest.raises(Exception) as caught:
        pool.run(one_rank_sleeps, 2, timeout=2)
    assert "rank 0 hangs at" in str(caught.value.__cause__)
    assert "in one_rank_sleeps" in str(caught.value.__cause__)
    assert [value for value, _ in pool.run(summed, 2, 1)] == [3, 3]


def test_stack_is_written_after_a_task_with_signal_handlers(pool):
    pool.run(install_and_restore_signal_handler, 1)
    with pytest.raises(TimeoutError) as caught:
        pool.run(one_rank_sleeps, 1, timeout=0.1)
    assert "in one_rank_sleeps" in str(caught.value.__cause__)


def test_dead_rank_is_reported_and_the_pool_goes_on(pool):
    with pytest.raises(RuntimeError, match="exit code 7"):
        pool.run(one_rank_dies, 2, timeout=20)
    assert [value for value, _ in pool.run(summed, 2, 1)] == [3, 3]


def break_gloo(rank: int, world_size: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "no-such-interface"


def test_workers_without_process_group_are_replaced(pool):
    pool.run(break_gloo, 2)
    with pytest.raises(RuntimeError):
        pool.run(summed, 2, 1, timeout=10)
    assert [value for value, _ in pool.run(summed, 2, 1)] == [3, 3]


def test_more_ranks_than_workers_is_an_error(pool):
    with pytest.raises(ValueError, match="world_size 9 .* max_workers 4"):
        pool.run(summed, 9, 1)


def test_function_must_be_importable(pool):
    with pytest.raises(Exception, match="lambda"):
        pool.run(lambda rank, world_size: rank, 1)


def test_a_death_is_raised_rather_than_the_errors_that_it_causes(pool):
    with pytest.raises(RuntimeError, match="exit code 7") as caught:
        pool.run(a_neighbour_fails_before_the_death_is_seen, 2)
    assert "connection closed by peer" in str(caught.value.__cause__)
