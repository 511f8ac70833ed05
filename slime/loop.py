"""The synchronous loop: generate, train, push weights, repeat. Read it first: it shows the whole system."""

from slime.arguments import Args
from slime.cluster.start import OpenCluster, open_cluster


def train(args: Args, opened: OpenCluster = open_cluster) -> None:
    """Run `args` to its end. `opened` builds the run's parts; a simulation passes modelled ones."""
    with opened(args) as cluster:  # engines, data source, trainer ranks
        schedule = cluster.schedule
        cluster.push_weights(schedule.start)
        cluster.evaluate_what_was_missed()
        if schedule.eval_only:
            cluster.evaluate(0)
        for rollout_id in schedule:
            if schedule.eval_before(rollout_id):
                cluster.evaluate(rollout_id)
            # Prompts -> samples -> rewards -> batch; engines hold the device.
            rollout = cluster.generate(rollout_id)
            # Log-probs -> advantages -> loss -> optimizer; the trainer holds the device.
            cluster.train(rollout_id, rollout.batch)
            if schedule.save_after(rollout_id):
                cluster.save(rollout_id, rollout)
            # The device holds the weights of both sides and nothing else.
            cluster.push_weights(rollout_id + 1)
            if schedule.eval_after(rollout_id):
                cluster.evaluate(rollout_id)
            if cluster.end_step(rollout_id, rollout):  # a user requested a stop
                break
