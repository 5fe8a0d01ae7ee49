#!/usr/bin/env bash
# torchrun on every node, with everything from the environment:
#
#   scripts/launch.sh fit --config configs/ddp.yaml                     one node, all its GPUs (or one process on a CPU)
#   NPROC_PER_NODE=2 scripts/launch.sh fit --config configs/ddp.yaml    one node, two processes
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host1 scripts/launch.sh fit ...    on host1, and with NODE_RANK=1 on the other
#
# MAX_RESTARTS (default 0): how often all workers are started again after a failure; the run goes on from its newest
# checkpoint. MASTER_PORT (default 29500) must be the same on all nodes, and open between them. Words after the script's name go to
# python -m project.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

fail() { echo "launch.sh: $1" >&2; exit 2; }
number() { [[ $2 =~ ^[0-9]+$ ]] || fail "$1 must be a number, and is '$2'."; }

NNODES=${NNODES:-1}
number NNODES "$NNODES"
[ "$NNODES" -ge 1 ] || fail "NNODES must be at least 1."
if [ "$NNODES" -gt 1 ]; then
  [ -n "${NODE_RANK:-}" ] || fail "NNODES=$NNODES, and NODE_RANK is not set. HINT: 0 on the first node, 1 on the second, ..."
  [ -n "${MASTER_ADDR:-}" ] || fail "NNODES=$NNODES, and MASTER_ADDR is not set. HINT: the name or address of the node with NODE_RANK=0."
fi
NODE_RANK=${NODE_RANK:-0}
number NODE_RANK "$NODE_RANK"
[ "$NODE_RANK" -lt "$NNODES" ] || fail "NODE_RANK=$NODE_RANK, and the last of NNODES=$NNODES nodes is $((NNODES - 1))."
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
MASTER_PORT=${MASTER_PORT:-29500}
number MASTER_PORT "$MASTER_PORT"
[ "$MASTER_PORT" -ge 1 ] && [ "$MASTER_PORT" -le 65535 ] || fail "MASTER_PORT=$MASTER_PORT is no port."
[ $# -gt 0 ] || fail "what to run? HINT: scripts/launch.sh fit --config configs/ddp.yaml"

"$root/scripts/setup"
python=$root/.venv/bin/python
if [ -z "${NPROC_PER_NODE:-}" ]; then
  NPROC_PER_NODE=$("$python" -c 'import torch; print(max(1, torch.cuda.device_count()))')
fi
number NPROC_PER_NODE "$NPROC_PER_NODE"
[ "$NPROC_PER_NODE" -ge 1 ] || fail "NPROC_PER_NODE must be at least 1."

MAX_RESTARTS=${MAX_RESTARTS:-0}
number MAX_RESTARTS "$MAX_RESTARTS"
# Without this a restart hangs or fails: workers would find the last attempt's keys in the agents' store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

cat <<TABLE
  nodes              $NNODES
  processes a node   $NPROC_PER_NODE
  this node          $NODE_RANK ($(uname -n))
  master             $MASTER_ADDR:$MASTER_PORT
TABLE

# The cores are shared out between the processes; torchrun would give each of them one, and say so at length.
cores=$("$python" -c 'from project.cluster.cores import cores; print(cores('"$NPROC_PER_NODE"'))')
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cores}
# SIGUSR1 is passed on to the workers, too: it is Slurm's warning before the time limit.
# '--' keeps torchrun from reading our flags as its own (it takes --run for --run-path).
# torchrun ends with 1 after a Ctrl-C, whatever its workers say; 130 is what a shell expects.
interrupted=
trap 'interrupted=1' INT
status=0
"$python" -m torch.distributed.run \
  --nnodes "$NNODES" --nproc-per-node "$NPROC_PER_NODE" --node-rank "$NODE_RANK" \
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --max-restarts "$MAX_RESTARTS" \
  --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
  -m project -- "$@" || status=$?
[ -z "$interrupted" ] || exit 130
exit "$status"
