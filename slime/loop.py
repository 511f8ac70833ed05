"""The synchronous loop: generate, train, push weights, again. Also the map of the system: read it first."""

from slime.arguments import Args
from slime.cluster.cluster import Cluster


def train(args: Args) -> None:
    """Run `args` to its end."""
    if args.update_weights_interval != 1:
        raise ValueError(
            "--update-weights-interval needs train_async.py (slime train-async): here engines get weights "
            "after every rollout"
        )
    with Cluster(args) as cluster:
        schedule = cluster.start()  # engines, data source, trainer ranks
        cluster.push_weights(schedule.start)
        if schedule.eval_only:
            cluster.evaluate(0)
        for rollout_id in schedule:
            if schedule.eval_before(rollout_id):
                cluster.evaluate(rollout_id)
            batch = cluster.generate(
                rollout_id
            )  # prompts -> samples -> rewards -> batch; engines hold the device
            cluster.train(
                rollout_id, batch
            )  # log-probs -> advantages -> loss -> optimizer; the trainer holds it
            if schedule.save_after(rollout_id):
                cluster.save(rollout_id, batch)
            cluster.push_weights(rollout_id + 1)  # weights of both sides are on the device, nothing else
            if schedule.eval_after(rollout_id):
                cluster.evaluate(rollout_id)
