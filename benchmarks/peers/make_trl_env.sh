#!/bin/sh
# make_trl_env.sh FOLDER: an environment with TRL of its own, for benchmarks/peers/trl_quickstart.py.
# TRL_VERSION chooses a release (default: the newest).
set -e
folder=${1:?usage: make_trl_env.sh FOLDER}
python3 -m venv "$folder"
"$folder/bin/pip" install -q "torch==2.13.0" "trl${TRL_VERSION:+==$TRL_VERSION}"
"$folder/bin/python" -c "import trl, torch, transformers; print('trl', trl.__version__, 'torch', torch.__version__, 'transformers', transformers.__version__)"
