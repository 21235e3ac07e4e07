#!/usr/bin/env bash
# F17: runs any program as a worker of flows; it needs only curl:
#
#   worker.sh [--once] KIND COMMAND [ARGUMENT...]
#
# Claims steps of KIND, one at a time. COMMAND gets the step as JSON on standard input. Its standard output is the artifact
# `output.txt`, its standard error is the log of the step, and its exit code decides between SUCCEEDED and FAILED.
# Environment: PENSTOCK_URL, PENSTOCK_TOKEN, LEASE (seconds).
set -euo pipefail

once=
if [[ ${1:-} == --once ]]; then once=yes; shift; fi
kind=${1:?usage: worker.sh [--once] KIND COMMAND...}
shift
api=${PENSTOCK_URL:-http://127.0.0.1:8080}/api/v1
worker="bash@${HOSTNAME:-here}:$$"
lease=${LEASE:-30}
folder=$(mktemp -d)
stopping=
trap '[[ $BASHPID != "$$" ]] || rm -rf "$folder"' EXIT # only in the main process
trap 'stopping=yes' TERM INT

ask() { # METHOD PATH [CURL OPTIONS...]: prints the response; fails if the server refuses
    curl --silent --show-error --fail --retry 5 --retry-connrefused --request "$1" "$api$2" \
        ${PENSTOCK_TOKEN:+--header "authorization: Bearer $PENSTOCK_TOKEN"} "${@:3}"
}

post() { # PATH JSON
    ask POST "$1" --header 'content-type: application/json' --data "$2"
}

value() { # NAME JSON: prints the first value of that name; valid for members before the inputs of the step
    [[ $2 =~ \"$1\":\"?([^\",}]+) ]] && printf '%s' "${BASH_REMATCH[1]}"
}

in_json() { # TEXT: prints a JSON string; control characters become spaces
    local text=${1//\\/\\\\}
    text=${text//\"/\\\"}
    printf '"%s"' "$(printf '%s' "$text" | tr '\000-\037' ' ')"
}

beat() { # JOB: extends the lease while the job runs; stops the job if the run is cancelled or the lease lost
    local response
    while sleep "$(awk "BEGIN { print $lease / 3 }")" && kill -0 "$1" 2>/dev/null; do
        response=$(post /flow_steps/heartbeat "{\"items\": [$name], \"leaseSeconds\": $lease}") || continue
        case $response in
            *'"state":"extended"'*) ;;
            *)
                value state "$response" >"$folder/stopped"
                kill "$1" 2>/dev/null || true
                return
                ;;
        esac
    done
}

log() { # FILE: sends its lines as the log of this attempt
    local lines='' line
    while IFS= read -r line || [[ -n $line ]]; do
        lines+="${lines:+, }{\"level\": \"info\", \"message\": $(in_json "${line:0:2000}")}"
    done < <(head -n 1000 "$1")
    [[ -z $lines ]] || post "$step/logs" "{\"fence\": $fence, \"lines\": [$lines]}" >/dev/null || true
}

work() { # COMMAND...: executes the step in $claimed
    local run_id step_id code job heartbeat
    run_id=$(value runId "$claimed") step_id=$(value stepId "$claimed") fence=$(value fence "$claimed")
    name="{\"runId\": \"$run_id\", \"stepId\": \"$step_id\", \"fence\": $fence}"
    step=/flow_runs/$run_id/steps/$(sed 's/\[/%5B/; s/]/%5D/' <<<"$step_id")
    rm -f "$folder/stopped"
    printf '%s' "$claimed" | "$@" >"$folder/output.txt" 2>"$folder/log.txt" &
    job=$!
    beat "$job" &
    heartbeat=$!
    while code=0 && { wait "$job" || code=$?; } && kill -0 "$job" 2>/dev/null; do :; done # a signal interrupts `wait`
    kill "$heartbeat" 2>/dev/null || true
    wait "$heartbeat" 2>/dev/null || true
    report "$code"
}

report() { # EXIT CODE
    local outcome artifacts error=
    case $(cat "$folder/stopped" 2>/dev/null) in
        lost) return ;; # a report would be refused
        cancelled) outcome='"status": "CANCELLED"' ;;
        *)
            log "$folder/log.txt"
            outcome='"status": "SUCCEEDED", "outputs": {"exitCode": 0}'
            if (($1)); then
                error="{\"code\": \"EXIT_$1\", \"message\": $(in_json "$(tail -n 1 "$folder/log.txt")")}"
            fi
            if ask PUT "$step/artifacts/output.txt?fence=$fence" --data-binary "@$folder/output.txt" \
                --header 'content-type: application/octet-stream' >/dev/null; then
                artifacts='["output.txt"]'
            else
                error='{"code": "UPLOAD_FAILED", "message": "the output could not be uploaded"}' artifacts='[]'
            fi
            [[ -z $error ]] || outcome="\"status\": \"FAILED\", \"error\": $error"
            outcome+=", \"artifacts\": $artifacts"
            ;;
    esac
    post "$step/report" "{\"fence\": $fence, \"worker\": \"$worker\", $outcome}" || true
    echo
}

while [[ -z $stopping ]]; do
    answer=$(post /flow_steps/claim \
        "{\"worker\": \"$worker\", \"kinds\": [\"$kind\"], \"leaseSeconds\": $lease, \"waitSeconds\": 10}") || {
        sleep 1
        continue
    }
    [[ $answer != '{"items":[]}' ]] || continue
    claimed=${answer#'{"items":['}
    claimed=${claimed%']}'}
    work "$@"
    [[ -z $once ]] || break
done
