#!/bin/sh
# make_verl_env.sh FOLDER: an environment with verl of its own, for benchmarks/peers/verl_step.py.
# VERL_VERSION chooses a release (default: the newest). Without its dependencies but those of a training step:
# inference servers are not asked for anything here.
set -e
folder=${1:?usage: make_verl_env.sh FOLDER}
python3 -m venv "$folder"
"$folder/bin/pip" install -q "torch==2.13.0" transformers accelerate peft ray pandas pyarrow tensordict codetiming hydra-core dill \
    orjson pyvers numpy packaging
"$folder/bin/pip" install -q --no-deps "verl${VERL_VERSION:+==$VERL_VERSION}"
"$folder/bin/python" -c "import verl, torch, transformers; print('verl', verl.__version__, 'torch', torch.__version__, 'transformers', transformers.__version__)"
