"""The loop of `loop.py`, but the next rollout is generated during training: one step off policy.

Weights change only between rollouts, so every sample of a batch comes from one version. The exception is a
rollout function that keeps groups in flight across rollouts (slime.rollout.fully_async_rollout); each of its
tokens records its version.
"""

from slime.arguments import Args
from slime.arguments.rules import for_asynchronous_loop
from slime.cluster.start import OpenCluster, open_cluster


def train(args: Args, opened: OpenCluster = open_cluster) -> None:
    """Run `args` to its end. `opened` builds the run's parts; a simulation passes modelled ones."""
    args = for_asynchronous_loop(args)
    with opened(args, overlapped=True) as cluster:
        schedule = cluster.schedule
        cluster.push_weights(schedule.start)
        cluster.evaluate_what_was_missed()
        # After a resume: the rollout that was in flight when the checkpoint was written.
        in_flight = cluster.start_generate(schedule.start) if schedule.has_next(schedule.start - 1) else None
        for rollout_id in schedule:
            assert in_flight is not None, "the schedule has a next rollout exactly when one was started"
            rollout = cluster.collect(rollout_id, in_flight)
            in_flight = cluster.start_generate(rollout_id + 1) if schedule.has_next(rollout_id) else None
            cluster.train(rollout_id, rollout.batch)
            if schedule.save_after(rollout_id):
                cluster.save(rollout_id, rollout, in_flight)
            if (rollout_id + 1) % args.update_weights_interval == 0:
                if in_flight is not None:
                    in_flight.result()  # only now: weights must not change during generation
                cluster.push_weights(rollout_id + 1)
            if schedule.eval_after(rollout_id):
                cluster.evaluate(rollout_id)
            if cluster.end_step(rollout_id, rollout, in_flight):  # a user requested a stop
                break
