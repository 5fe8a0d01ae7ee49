#!/usr/bin/env bash
# torchrun on every node, with everything from the environment:
#
#   scripts/launch.sh fit --config configs/ddp.yaml                     one node, all its GPUs (or one process on a CPU)
#   NPROC_PER_NODE=2 scripts/launch.sh fit --config configs/ddp.yaml    one node, two processes
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host1 scripts/launch.sh fit ...    on host1, and with NODE_RANK=1 on the other
#   NNODES=1:2 RUN_ID=wide MASTER_ADDR=host1 scripts/launch.sh fit ...  on host1 and one more, which may come and go
#
# NNODES         how many nodes, or MIN:MAX: the run goes on while at least MIN are there, from its newest checkpoint
#                whenever one is lost or comes (back). The node that MASTER_ADDR names holds them together and must stay.
# NODE_RANK      0 on the node that MASTER_ADDR names, another number on each other one. Not needed for MIN:MAX. Rank 0,
#                which prints, is on the node whose address sorts first.
# RUN_ID         the same on all nodes, and the run's name with the config's: who starts again under it continues with that
#                run. MIN:MAX needs it, because the node that named the run may be the one that is lost.
# MASTER_PORT    (29500; on one node any that is free) the same on all nodes, and open between them.
# MAX_RESTARTS   (0; for MIN:MAX 10) how often all workers are started again after a failure; the run resumes from its
#                newest checkpoint.
# JOIN_TIMEOUT   (300; for the doctor 30) seconds that the nodes wait for each other; who is missing then is named.
# TORCH_ELASTIC_SHUTDOWN_TIMEOUT  (300) seconds from a signal (Ctrl-C, SIGTERM) to SIGKILL: what a checkpoint may take.
# RDZV_CONF      more settings of torchrun's rendezvous, or other values: last_call_timeout=60,keep_alive_interval=5
# PET_...        what Kubeflow's TrainJob says, and torchrun's own: PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK,
#                PET_MASTER_ADDR and PET_MASTER_PORT are taken where the names above are not set.
# PROJECT_PYTHON a Python that has the project's libraries already; otherwise scripts/setup makes .venv.
#
# Words after the script's name go to python -m project.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

fail() { echo "launch.sh: $1" >&2; exit 2; }
number() { [[ $2 =~ ^[0-9]+$ ]] || fail "$1 must be a number, and is '$2'."; }

NNODES=${NNODES:-${PET_NNODES:-1}}
NODE_RANK=${NODE_RANK:-${PET_NODE_RANK:-}}
MASTER_ADDR=${MASTER_ADDR:-${PET_MASTER_ADDR:-}}
port=${MASTER_PORT:-${PET_MASTER_PORT:-0}}  # on one node, any that is free
MASTER_PORT=${MASTER_PORT:-${PET_MASTER_PORT:-29500}}
NPROC_PER_NODE=${NPROC_PER_NODE:-${PET_NPROC_PER_NODE:-auto}}
unset PET_NNODES PET_NODE_RANK PET_MASTER_ADDR PET_MASTER_PORT PET_NPROC_PER_NODE  # torchrun gets them as words
unset PROJECT_NODES PROJECT_STORE  # of another run, in which this was started
elastic=
if [[ $NNODES == *:* ]]; then
  elastic=1
  [[ $NNODES =~ ^[0-9]+:[0-9]+$ ]] || fail "NNODES must be a number or MIN:MAX, and is '$NNODES'."
else
  number NNODES "$NNODES"
fi
min_nodes=${NNODES%:*} max_nodes=${NNODES#*:}
[ "$min_nodes" -ge 1 ] || fail "NNODES must be at least 1."
[ "$min_nodes" -le "$max_nodes" ] || fail "NNODES=$NNODES: its first number, the least, is greater than the other."
if [ -n "$elastic" ]; then
  export PROJECT_NODES=$NNODES  # each of these numbers has to make the global batch
  [ -n "${MASTER_ADDR:-}" ] || fail "NNODES=$NNODES, and MASTER_ADDR is not set. HINT: the name or address of a node that stays."
  [ -n "${RUN_ID:-}" ] || [[ " $* " == *" --run"[=\ ]* ]] ||
    fail "NNODES=$NNODES, and RUN_ID is not set. HINT: a name for this run, the same on all nodes: RUN_ID=$(date +%Y%m%d-%H%M)"
elif [ "$max_nodes" -gt 1 ]; then
  [ -n "${NODE_RANK:-}" ] || fail "NNODES=$NNODES, and NODE_RANK is not set. HINT: 0 on the first node, 1 on the second, ..."
  [ -n "${MASTER_ADDR:-}" ] || fail "NNODES=$NNODES, and MASTER_ADDR is not set. HINT: the name or address of the node with NODE_RANK=0."
fi
if [ -n "${NODE_RANK:-}" ]; then
  number NODE_RANK "$NODE_RANK"
  [ "$NODE_RANK" -lt "$max_nodes" ] || fail "NODE_RANK=$NODE_RANK, and the last of NNODES=$NNODES nodes is $((max_nodes - 1))."
fi
[[ ${RUN_ID:-a} =~ ^[A-Za-z0-9_.-]+$ ]] || fail "RUN_ID is made of letters, digits, '.', '_' and '-', and '$RUN_ID' is not."
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
number MASTER_PORT "$MASTER_PORT"
[ "$MASTER_PORT" -ge 1 ] && [ "$MASTER_PORT" -le 65535 ] || fail "MASTER_PORT=$MASTER_PORT is no port."
MAX_RESTARTS=${MAX_RESTARTS:-${elastic:+10}}
MAX_RESTARTS=${MAX_RESTARTS:-0}
number MAX_RESTARTS "$MAX_RESTARTS"
[ $# -gt 0 ] || fail "what to run? HINT: scripts/launch.sh fit --config configs/ddp.yaml"
[ "$1" = doctor ] && patience=30 || patience=300
JOIN_TIMEOUT=${JOIN_TIMEOUT:-$patience}
number JOIN_TIMEOUT "$JOIN_TIMEOUT"

python=${PROJECT_PYTHON:-}
if [ -z "$python" ]; then
  "$root/scripts/setup"
  python=$root/.venv/bin/python
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
case $NPROC_PER_NODE in
  auto) NPROC_PER_NODE=$("$python" -c 'import torch; print(max(1, torch.cuda.device_count()))') ;;
  gpu)
    NPROC_PER_NODE=$("$python" -c 'import torch; print(torch.cuda.device_count())')
    [ "$NPROC_PER_NODE" -ge 1 ] || fail "NPROC_PER_NODE=gpu, and there is no GPU here."
    ;;
  cpu) NPROC_PER_NODE=$("$python" -c 'from project.cluster.cores import cores; print(cores())') ;;
esac
[[ $NPROC_PER_NODE =~ ^[0-9]+$ ]] || fail "NPROC_PER_NODE is a number, auto, gpu or cpu, and not '$NPROC_PER_NODE'."
[ "$NPROC_PER_NODE" -ge 1 ] || fail "NPROC_PER_NODE must be at least 1."

# Without this a restart hangs or fails: workers would find the last attempt's keys in the agents' store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# The agents end one after the other, and each would tell at length that the store of the first has gone.
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}

if [ "$max_nodes" -gt 1 ]; then
  # torchrun would guess both from the host's name: wrongly where it resolves to 127.0.1.1, or not at all.
  # In Kubernetes a name is known only when its pod has been started: there it is waited for, and being late is no usage error.
  patience=0
  [ -z "${KUBERNETES_SERVICE_HOST:-}" ] || patience=$JOIN_TIMEOUT
  interface=$("$python" -m project.cluster.interfaces "$MASTER_ADDR" "$patience") || exit $((patience ? 1 : 2))
  read -r address is_master <<<"$interface"
  [ -z "${NODE_RANK:-}" ] || is_master=$((NODE_RANK == 0))
  # A node is lost when its agent has not spoken for 10 s; the others then wait 15 s for more to come.
  conf=is_host=$is_master,join_timeout=$JOIN_TIMEOUT,last_call_timeout=15,keep_alive_interval=2,keep_alive_max_attempt=5
  rendezvous=(
    --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-id "${RUN_ID:-none}"
    --rdzv-conf "$conf${RDZV_CONF:+,$RDZV_CONF}" --local-addr "$address"
  )
  # Where the hosts of an elastic run are cut apart, the part that reaches the agents' store resumes.
  if [ -n "$elastic" ]; then
    export PROJECT_STORE=$MASTER_ADDR:$MASTER_PORT
    [ "$is_master" -eq 0 ] || PROJECT_STORE=here
  fi
  this="$(uname -n)${PROJECT_NODE:+ on $PROJECT_NODE}, $address"
  join=()
  [ "$is_master" -eq 1 ] || join=(--join "$MASTER_ADDR" "$MASTER_PORT" "$JOIN_TIMEOUT")
else
  # torchrun's static rendezvous has one store for all attempts: after a failure the ranks would look for those of the last one.
  rendezvous=(
    --rdzv-backend c10d --rdzv-endpoint "127.0.0.1:$port" --rdzv-id "${RUN_ID:-none}"
    --rdzv-conf "is_host=1${RDZV_CONF:+,$RDZV_CONF}" --local-addr 127.0.0.1
  )
  this=$(uname -n)${PROJECT_NODE:+ on $PROJECT_NODE}
  join=()
fi

cat <<TABLE
  nodes              $NNODES
  processes a node   $NPROC_PER_NODE
  this node          ${NODE_RANK:+$NODE_RANK }($this)
TABLE
[ "$max_nodes" -eq 1 ] || echo "  master             $MASTER_ADDR:$MASTER_PORT"

# A host that was lost and comes back: does it work? It takes seconds; exit code 69 is a host that the run does without.
if [ -n "$elastic" ]; then
  code=0
  timeout 300 "$python" -m project.doctor.joining "$NPROC_PER_NODE" >&2 || code=$?
  [ "$code" -ne 124 ] || { echo "launch.sh: the check of this host did not end within 300 s." >&2; code=69; }
  [ "$code" -eq 0 ] || exit "$code"
fi

# The cores are shared out between the processes; torchrun would give each of them one, and say so at length.
cores=$("$python" -c 'from project.cluster.cores import cores; print(cores('"$NPROC_PER_NODE"'))')
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cores}

# torchrun would wait ten minutes for a node that does not come, and not say which.
if [ "$max_nodes" -gt 1 ] && [ -z "$elastic" ]; then
  "$python" -m project.cluster.rendezvous --node-rank "$NODE_RANK" --nodes "$NNODES" \
    --address "$MASTER_ADDR" --port "$MASTER_PORT" --processes "$NPROC_PER_NODE" --seconds "$JOIN_TIMEOUT"
fi

# In place of this script, so that a signal to it is one to torchrun.
# '--' keeps torchrun from reading our flags as its own (it takes --run for --run-path).
exec "$python" -m project.launch.torchrun_agent ${join[@]+"${join[@]}"} \
  --nnodes "$NNODES" --nproc-per-node "$NPROC_PER_NODE" "${rendezvous[@]}" --max-restarts "$MAX_RESTARTS" \
  -m project -- "$@"
