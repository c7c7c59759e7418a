"""The checker, on hand-made histories: a true one, and for each promise one in which it is broken."""

from tests.chaos.projection import of_policy
from tests.chaos.tale import begun, third_stored, true_tale, two_steps


def test_a_true_history_is_accepted_with_its_figures():
    verdict = true_tale().verdict()
    assert verdict.violations == []
    assert verdict.figures["acknowledged_episodes"] == 6
    assert verdict.figures["lost_episodes"] == verdict.figures["trained_twice"] == 0
    assert verdict.figures["max_staleness"] == 0
    assert verdict.figures["steps"] == 3


def test_a_redone_step_is_accepted_and_counted():
    tale, group_id = third_stored()
    tale.batched(2, group_id, 2)
    tale.trained(2, group_id)
    tale.opened(2, moved={group_id: ["TRAINED", "BATCHED", 2]})
    tale.published(2, same_as=[1])
    verdict = tale.ended(group_id, same_as=[1]).verdict()
    assert verdict.violations == []
    assert verdict.figures["steps_redone"] == 1


def test_lost_when_the_next_front_finds_a_group_without_what_was_stored():
    tale, group_id = third_stored()
    tale.groups[group_id][2] = {0}
    tale.new_front()
    assert "lost" in tale.ended(group_id).broken()


def test_lost_when_an_acknowledged_episode_was_never_stored():
    tale = two_steps()
    group_id = tale.leased("t2")
    tale.put(group_id, (1, 2), store=False)
    tale.put(group_id, (1, 2))
    assert "early_acknowledgement" in tale.ended(group_id).broken()
    del tale.events[-1]
    other = tale.leased("t3")
    tale.put(other, (1, 2), store=False)
    tale.finished()
    assert {"lost", "early_acknowledgement"} <= tale.broken()


def test_lost_when_redis_comes_back_without_confirmed_writes():
    def tale_of(told):
        tale = two_steps()
        revision, position = tale.revision, tale.position
        group_id = tale.leased("t2")
        tale.put(group_id, (1, 2))
        lost = tale.revision - revision
        # The same process takes the ledger over again.
        tale.groups.clear()
        tale.revision, tale.position = revision, position
        tale.front_epoch += 1
        tale.loaded(lost_writes=lost if told else 0)
        tale.leased("t2")
        tale.put(group_id, (1, 2))
        return tale.ended(group_id)

    assert "lost" in tale_of(told=1).broken()
    assert tale_of(told=1).broken(lost_s=1.0) == {"lost"}, "more than is allowed"
    allowed = tale_of(told=1).verdict(lost_s=60.0)
    assert allowed.violations == []
    assert allowed.figures["lost_writes"] == 3
    assert allowed.figures["lost_work_s"] > 1
    assert "undetected" in tale_of(told=0).broken(lost_s=60.0)


def test_an_acknowledgement_before_the_write_is_confirmed_is_flagged():
    tale, group_id = third_stored(early=True)
    assert tale.ended(group_id).broken() == {"early_acknowledgement"}


def test_a_write_that_never_came_true_is_no_loss():
    """Decided, not confirmed, and the front dies: nobody was told of it."""
    tale = two_steps()
    revision, position = tale.revision, tale.position
    group_id = "t2#0"
    tale.position += 1
    tale.decided("Lease", confirmed=False, moved={group_id: ["", "LEASED", -1]})
    tale.groups.clear()
    tale.revision, tale.position = revision, position
    tale.new_front()
    tale.leased("t2")
    tale.put(group_id, (1, 2))
    assert tale.ended(group_id).verdict().violations == []


def test_trained_twice_when_a_group_is_in_two_steps_of_the_final_model():
    tale = two_steps()
    tale.groups["t1#0"] = ["BATCHED", 2, {0, 1}]
    tale.batched(2, "t1#0", 1)
    tale.trained(2, "t1#0")
    tale.finished()
    assert "trained_twice" in tale.broken()
    assert "trained_twice" not in tale.broken(max_reuse=2)


def test_trained_twice_when_a_task_is_in_two_groups_of_the_final_model():
    tale = two_steps()
    group_id = tale.leased("t1", attempt=1)
    tale.put(group_id, (1, 2))
    assert "trained_twice" in tale.ended(group_id).broken()


def test_staleness_is_bounded_in_every_batch_that_was_trained():
    tale = begun()
    groups = [tale.leased(f"t{number}") for number in range(3)]
    for group_id in groups:
        tale.put(group_id, (1, 0))
    for step, group_id in enumerate(groups):
        tale.step(step, group_id, 0)
    tale.finished()
    verdict = tale.verdict()
    assert verdict.kinds() == {"stale"}
    assert verdict.figures["max_staleness"] == 2
    assert tale.verdict(max_staleness=2).violations == []


def test_groups_are_whole():
    tale, group_id = third_stored()
    tale.batched(2, group_id, 2, episodes=[[f"{group_id}.0", 2]])
    tale.trained(2, group_id)
    tale.finished()
    assert tale.broken() == {"not_whole"}


def test_a_batch_of_what_was_never_stored_is_flagged():
    tale, group_id = third_stored()
    tale.batched(2, group_id, 1)
    tale.trained(2, group_id)
    tale.finished()
    assert tale.broken() == {"not_stored"}


def test_a_redone_step_with_other_groups_is_flagged():
    tale = two_steps()
    first, other = tale.leased("t2"), tale.leased("t3")
    for group_id in (first, other):
        tale.put(group_id, (1, 2))
    tale.batched(2, first, 2)
    tale.opened(2, moved={first: ["BATCHED", "SCORED", -1]})
    tale.published(2, same_as=[1])
    assert tale.ended(other).broken() == {"batch"}


def test_a_redone_step_may_lose_what_was_abandoned():
    tale = two_steps()
    first = tale.leased("t2")
    tale.put(first, (1, 2))
    tale.batched(2, first, 2)
    tale.opened(2)
    tale.published(2)
    counts = {"dropped:abandoned": 1}
    moved = {first: ["BATCHED", "", 2], "t2#1": ["", "QUEUED", -1]}
    tale.decided("NextBatch", moved=moved, counts=counts)
    tale.served(2)
    tale.decided("Lease", moved={"t2#1": ["QUEUED", "LEASED", -1]})
    tale.leases["t2#1"] = "again"
    lease = {"lease_id": "again", "group_id": "t2#1"}
    tale.tell("rollout-0", "leased", **lease, missing=[0, 1], epoch=2, version=2)
    tale.put("t2#1", (2, 2))
    assert tale.ended("t2#1").verdict().violations == []


def ahead(*, published_first=True):
    """Two steps; then the batch of the second of two more is given before the first is committed."""
    tale = two_steps()
    groups = [tale.leased(f"t{number}") for number in (2, 3)]
    for group_id in groups:
        tale.put(group_id, (1, 2))
    tale.batched(2, groups[0], 2)
    tale.tell("trainer", "trained", epoch=1, step=2)
    tale.batched(3, groups[1], 2)
    if published_first:
        tale.published(3)
    tale.v_train = 3
    tale.decided("Commit", moved={groups[0]: ["BATCHED", "TRAINED", 2]})
    if not published_first:
        tale.published(3)
    tale.saved(3, groups[0])
    tale.trained(3, groups[1])
    tale.saved(4, groups[1])
    tale.finished()
    return tale


def test_a_batch_one_step_ahead_of_the_commits_is_accepted():
    assert ahead().verdict(steps=4).violations == []


def test_a_batch_two_steps_ahead_of_the_commits_is_flagged():
    tale = two_steps()
    group_id = tale.leased("t2")
    tale.put(group_id, (1, 2))
    tale.v_train = 0
    tale.batched(2, group_id, 2)
    assert "order" in tale.broken()


def test_a_commit_before_the_publication_is_flagged():
    assert "order" in ahead(published_first=False).broken(steps=4)


def test_training_on_units_of_abandoned_weights_is_flagged():
    """Epoch 1 had published version 2 otherwise than epoch 2 did."""
    tale = begun()
    groups = [tale.leased(f"t{number}") for number in range(3)]
    for group_id in groups[:2]:
        tale.put(group_id, (1, 0))
    tale.step(0, groups[0], 0)
    tale.batched(1, groups[1], 0)
    tale.trained(1, groups[1])
    tale.served(2)
    late = tale.leased("t3")
    tale.put(late, (1, 2))
    tale.opened(1, moved={groups[1]: ["TRAINED", "BATCHED", 1]})
    tale.published(1, same_as=[1])
    tale.step(1, groups[1], 0)
    assert tale.ended(late).broken() == {"abandoned"}
    # Had the weights been the same, it would have been right.
    for event in tale.events:
        if event["event"] == "published" and (event["epoch"], event["version"]) == (2, 2):
            event["same_as"] = [1]
    assert tale.verdict().violations == []


def test_a_group_that_ends_without_a_reason_is_flagged():
    tale = true_tale()
    group_id = tale.leased("t3")
    tale.decided("Expire", moved={group_id: ["LEASED", "", -1]})
    assert "no_reason" in tale.broken()


def test_a_group_that_ends_by_bad_luck_is_tried_again():
    def tale_of(*successor):
        tale = true_tale()
        group_id = tale.leased("t3")
        moved = {group_id: ["LEASED", "", -1]} | {id_: ["", "QUEUED", -1] for id_ in successor}
        tale.decided("NextBatch", moved=moved, counts={"dropped:stale": 1})
        return tale

    assert tale_of("t3#1").verdict().violations == []
    assert tale_of().broken() == {"task_skipped"}


def test_a_group_that_ends_by_its_own_fault_is_not():
    tale = true_tale()
    group_id = tale.leased("t3")
    tale.decided("PutVerdicts", moved={group_id: ["LEASED", "", -1]}, counts={"dropped:verdict_error": 1})
    assert tale.verdict().violations == []


def test_the_cursor_moves_task_by_task_in_the_order_of_the_file():
    skipped = true_tale()
    skipped.position += 1
    skipped.leased("t4")
    assert {"task_order", "task_skipped"} <= skipped.broken()
    repeated = true_tale()
    repeated.position -= 1
    repeated.leased("t2")
    assert "task_order" in repeated.broken()


def test_versions_are_true_to_what_the_worker_served():
    tale, group_id = third_stored((1, 1))
    assert tale.ended(group_id, 1).broken() == {"version"}


def test_versions_are_true_by_the_engine_that_sampled():
    """While one engine of a worker is exchanged, another still serves what was before."""

    def tale(*replicas):
        tale = two_steps()
        for replica in replicas:
            tale.served(1, replica=replica)
        group_id = tale.leased("t2")
        tale.put(group_id, (1, 1))
        tale.served(2, replica=1)
        return tale.ended(group_id, 1)

    assert tale(1).broken() == set()
    assert tale().broken() == {"version"}


def test_a_version_that_nobody_published_is_flagged():
    tale = two_steps()
    tale.served(7)
    assert "version" in tale.broken()


def test_versions_are_monotone_in_each_process_and_epoch():
    served = true_tale()
    served.served(3)
    served.served(2)
    assert served.broken() == {"goes_back"}
    published = true_tale()
    published.published(3)
    assert published.broken() == {"goes_back"}
    ledger = true_tale()
    ledger.v_train = 1
    ledger.decided("Commit")
    assert ledger.broken() == {"goes_back"}


def test_bytes_freed_before_the_checkpoint_are_flagged():
    tale, group_id = third_stored()
    tale.batched(2, group_id, 2)
    tale.trained(2, group_id)
    tale.saved(3, group_id, told_first=True)
    tale.finished()
    assert tale.broken() == {"freed_early"}


def test_a_commit_of_what_was_not_trained_is_flagged():
    tale, group_id = third_stored()
    tale.batched(2, group_id, 2)
    tale.published(3)
    tale.v_train = 3
    tale.decided("Commit", moved={group_id: ["BATCHED", "TRAINED", 2]})
    tale.tell("trainer", "trained", epoch=1, step=2)
    tale.finished()
    assert tale.broken() == {"untrained"}


def test_an_unfinished_run_is_flagged():
    assert "unfinished" in two_steps().broken()


def of_two(tale, *, of_bob="COMMITTED"):
    """The tale as that of alice in a job with bob: what has ended for her is held for him a little longer,
    and ends then as `of_bob`."""
    nothing = {"v_train": 0, "trainer_epoch": 0, "checkpoint": 0}
    events = []
    for event in tale.events:
        event = dict(event)
        if event["event"] in ("loaded", "decided"):
            event["policies"] = {"alice": {name: event.pop(name) for name in nothing}, "bob": nothing}
        if event["event"] == "loaded":
            groups = event["groups"].items()
            event["groups"] = {f"{policy}/{id_}": held for id_, held in groups for policy in ("bob", "alice")}
        later = {}
        if event["event"] == "decided":
            moved = event.get("moved", {})
            event["moved"] = {
                f"alice/{id_}": [was, becomes or "COMMITTED", step]
                for id_, (was, becomes, step) in moved.items()
            }
            later = {
                f"alice/{id_}": ["COMMITTED", "", step] for id_, (_, to, step) in moved.items() if not to
            }
            later |= {f"bob/{id_}": ["SCORED", "", -1] for id_, (_, to, _) in moved.items() if not to}
            event["stored"] = [[f"alice/{id_}", *held] for id_, *held in event.get("stored", [])]
            event["batches"] = {f"alice/{step}": groups for step, groups in event.get("batches", {}).items()}
            event["counts"] = {
                name if name.startswith("dropped") else f"{name}:for_one": n
                for name, n in event.get("counts", {}).items()
            }
        if event["process"] == "trainer":
            event["policy"] = "alice"
        events.append(event)
        if later:
            events.append(event | {"moved": later, "stored": [], "batches": {}, "counts": {of_bob: 1}})
    tale.events = [*of_policy(events, "alice")]
    return tale


def test_of_several_policies_each_has_a_history_of_its_own():
    verdict = of_two(true_tale()).verdict()
    assert verdict.violations == []
    assert (verdict.figures["steps"], verdict.figures["acknowledged_episodes"]) == (3, 6)
    assert of_two(true_tale()).broken(batch_groups=2) == {"not_whole"}
    tale, group_id = third_stored()
    tale.groups[group_id][2] = {0}
    tale.new_front()
    assert "lost" in of_two(tale.ended(group_id)).broken()
    tale = two_steps()
    tale.step(2, tale.leased("t2"), 2)
    tale.finished()
    assert {"not_stored"} <= of_two(tale).broken()


def test_an_attempt_for_another_policy_alone_is_not_in_its_history():
    last = next(event for event in reversed(true_tale().events) if event["event"] == "decided")
    place = {name: last[name] for name in ("trainer_epoch", "v_train", "checkpoint")}
    taken = last | {"policies": {"alice": place}, "position": last["position"] + 1}
    moved = {"bob/t3#0:bob": ["", "LEASED", -1], "bob/t1#1:bob": ["", "QUEUED", -1]}
    (seen,) = of_policy([taken | {"moved": moved}], "alice")
    assert (seen["moved"], seen["position"]) == ({}, last["position"])
    moved = {"alice/t1#1:alice": ["", "QUEUED", -1], "alice/t2#0": ["TRAINED", "COMMITTED", 2]}
    (seen,) = of_policy([taken | {"moved": moved, "counts": {"dropped:stale_for_one": 1}}], "alice")
    assert seen["moved"] == {"t1#1": ["", "QUEUED", -1], "t2#0": ["TRAINED", "", 2]}
    assert seen["counts"] == {"dropped:stale": 1, "committed": 1}
