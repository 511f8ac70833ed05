"""Two agents, one policy: a solver sorts digits, a critic says whether it did; both are trained.

python examples/multi_agent/agents.py warm_up FILE   conversations of both, often wrong
python examples/multi_agent/agents.py score DIR...   held-out accuracy of solver and critic of each model

`generate` is a --custom-generate-function-path, `reward` a --custom-rm-path, `normalise` a
--custom-reward-post-process-path.
"""

import argparse
import itertools
import json
import random
from collections import defaultdict
from pathlib import Path
from statistics import mean, pstdev

from slime.agent.session import Budget, Session
from slime.cli.quickstart import tasks

SEED, NUM_ROWS = 7, 24_576
CRITIC_KNOWS = 0.7  # of the warm-up's verdicts are right
YES, NO = "y", "n"


async def generate(args, sample, sampling_params):
    """One episode is two conversations of one session: each becomes a sample, with a reward of its own."""
    budget = Budget(max_new_tokens=args.rollout_max_response_len)
    session = Session.of_run(args, sample, sampling_params, budget=budget)
    answer = await session.turn([user(sample.prompt)])
    verdict = await session.turn([user(question_to_critic(sample.prompt, answer.text))])
    right = answer.text == sample.label
    solver, critic = session.samples(sample)
    solver.metadata |= {"role": "solver", "score": float(right)}
    critic.metadata |= {"role": "critic", "score": float(verdict.text == (YES if right else NO))}
    critic.metadata["read_right_answer"] = right
    return [solver, critic]


def reward(args, sample):
    return sample.metadata["score"]


def normalise(args, samples):
    """Advantages for each agent apart: a solver is compared with solvers of its prompt, as GRPO does.

    A critic is compared with those critics of the step that read a right answer, or a wrong one, as it did;
    both kinds weigh the same, however many there are, so that nothing is gained by saying no to everything.
    """
    solvers, critics = defaultdict(list), defaultdict(list)
    for place, sample in enumerate(samples):
        if sample.metadata["role"] == "solver":
            solvers[sample.group_index].append(place)
        else:
            critics[sample.metadata["read_right_answer"]].append(place)
    raw = [float(sample.reward) for sample in samples]
    out = [0.0] * len(samples)
    num_critics = sum(map(len, critics.values()))
    weighed = [(found, 1.0) for found in solvers.values()]
    weighed += [(found, num_critics / len(critics) / len(found)) for found in critics.values()]
    for found, weight in weighed:
        scores = [raw[place] for place in found]
        for place in found:
            out[place] = weight * (raw[place] - mean(scores)) / (pstdev(scores) + 1e-6)
    return raw, out


def user(text):
    return {"role": "user", "content": text}


def question_to_critic(prompt, answer):
    return f"{prompt}{answer}?"


def warm_up(file):
    """The solver answers by one of four habits; the critic knows the format and is right often."""
    rng = random.Random(SEED)
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w") as out:
        for problem in itertools.islice(tasks.draw_habits(SEED), NUM_ROWS // 2):
            right = problem.label == "".join(sorted(problem.label))
            knows = rng.random() < CRITIC_KNOWS
            critic = question_to_critic(problem.prompt, problem.label)
            rows = (problem.prompt, problem.label), (critic, YES if right == knows else NO)
            for prompt, text in rows:
                row = {"messages": [user(prompt), {"role": "assistant", "content": text}]}
                out.write(json.dumps(row) + "\n")


def score(folder):
    """Greedy, on held-out digits; the critic judges a fresh answer by each of the four habits."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    problems = tasks.SORT_DIGITS.draw_held_out()
    habits = itertools.cycle([tasks.HABITS["sorted"], *tasks.HABITS.values()])
    answers = [next(habits)(problem.prompt.removesuffix(">")) for problem in problems]
    asked = {
        "solver": [(problem.prompt, problem.label) for problem in problems],
        "critic": [
            (question_to_critic(problem.prompt, answer), YES if answer == problem.label else NO)
            for problem, answer in zip(problems, answers, strict=True)
        ],
    }
    for role, rows in asked.items():
        batch = tokenizer([prompt for prompt, _ in rows], return_tensors="pt", padding=True)
        out = model.generate(**batch, max_new_tokens=8, do_sample=False)
        said = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        hits = [reply == label for reply, (_, label) in zip(said, rows, strict=True)]
        print(f"{folder}: {role} is right in {mean(hits):.3f} of {len(hits)} held-out cases", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["warm_up", "score"])
    parser.add_argument("paths", nargs="+", metavar="PATH")
    options = parser.parse_args()
    for path in options.paths:
        {"warm_up": warm_up, "score": score}[options.what](path)


if __name__ == "__main__":
    main()
