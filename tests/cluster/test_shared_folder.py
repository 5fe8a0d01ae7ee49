"""What hosts that don't share a folder say of it; tests/cluster/test_unfit.py has the hosts."""

from project.cluster.shared_folder import file_problem, moved


def test_a_checkpoint_that_one_host_does_not_see_or_has_otherwise(tmp_path):
    hosts, path = ["h1", "h2", "h3"], tmp_path / "step-1.ckpt"
    path.write_bytes(b"weights")
    assert file_problem(path, hosts, lambda mine: [mine, mine, mine]) is None
    assert file_problem(path, hosts, lambda mine: [mine, mine, None]).startswith("rank 2 on h3 can't see")
    ours = []
    file_problem(path, hosts, lambda mine: ours.append(mine) or [mine])
    path.write_bytes(b"another")
    assert "rank 1 on h2" in file_problem(path, hosts, lambda mine: [mine, *ours, mine])


def test_rank_0_stays_where_the_folder_is(tmp_path):
    folders = {"h1": tmp_path / "1", "h2": tmp_path / "2"}

    def start(*hosts):
        said = []
        for rank, host in enumerate(hosts):
            moved(folders[host], rank, hosts, lambda mine, host=host: said.append(mine) or [str(folders[host])])
        notes = said[1::2]
        return moved(folders[hosts[0]], 0, hosts, lambda mine: [mine] if mine == str(folders[hosts[0]]) else notes)

    assert start("h1", "h2") is None
    assert start("h1", "h2") is None
    assert start("h2", "h1")[0].startswith("Only h1 has this run's folder")
