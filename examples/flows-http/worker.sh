#!/usr/bin/env bash
# F17: any program as a worker of flows, with curl alone:
#
#   worker.sh [--once] KIND COMMAND [ARGUMENT...]
#
# Claims steps of KIND one by one. COMMAND gets the step as JSON on standard input; what it prints is the artifact
# `output.txt`, what it complains of is the step's log, and its exit code decides. PENSTOCK_URL, PENSTOCK_TOKEN and
# LEASE (seconds) are taken from the environment.
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
trap '[[ $BASHPID != "$$" ]] || rm -rf "$folder"' EXIT # not when a part of us ends
trap 'stopping=yes' TERM INT

ask() { # METHOD PATH [CURL OPTIONS...]: the answer; fails when the server refuses
    curl --silent --show-error --fail --retry 5 --retry-connrefused --request "$1" "$api$2" \
        ${PENSTOCK_TOKEN:+--header "authorization: Bearer $PENSTOCK_TOKEN"} "${@:3}"
}

post() { # PATH JSON
    ask POST "$1" --header 'content-type: application/json' --data "$2"
}

value() { # NAME JSON: the first value of that name; enough for what comes before a step's own inputs
    [[ $2 =~ \"$1\":\"?([^\",}]+) ]] && printf '%s' "${BASH_REMATCH[1]}"
}

in_json() { # TEXT: as a string of JSON; what JSON has no room for becomes a space
    local text=${1//\\/\\\\}
    text=${text//\"/\\\"}
    printf '"%s"' "$(printf '%s' "$text" | tr '\000-\037' ' ')"
}

beat() { # JOB: hold on to the step while the job runs; stop it when told to
    local told
    while sleep "$(awk "BEGIN { print $lease / 3 }")" && kill -0 "$1" 2>/dev/null; do
        told=$(post /flow_steps/heartbeat "{\"items\": [$name], \"leaseSeconds\": $lease}") || continue
        case $told in
            *'"state":"extended"'*) ;;
            *)
                value state "$told" >"$folder/stopped"
                kill "$1" 2>/dev/null || true
                return
                ;;
        esac
    done
}

log() { # every line of a file, as the log of this attempt
    local lines='' line
    while IFS= read -r line || [[ -n $line ]]; do
        lines+="${lines:+, }{\"level\": \"info\", \"message\": $(in_json "${line:0:2000}")}"
    done < <(head -n 1000 "$1")
    [[ -z $lines ]] || post "$step/logs" "{\"fence\": $fence, \"lines\": [$lines]}" >/dev/null || true
}

work() { # the step in $claimed
    local run_id step_id code job beating
    run_id=$(value runId "$claimed") step_id=$(value stepId "$claimed") fence=$(value fence "$claimed")
    name="{\"runId\": \"$run_id\", \"stepId\": \"$step_id\", \"fence\": $fence}"
    step=/flow_runs/$run_id/steps/$(sed 's/\[/%5B/; s/]/%5D/' <<<"$step_id")
    rm -f "$folder/stopped"
    printf '%s' "$claimed" | "$@" >"$folder/output.txt" 2>"$folder/log.txt" &
    job=$!
    beat "$job" &
    beating=$!
    while code=0 && { wait "$job" || code=$?; } && kill -0 "$job" 2>/dev/null; do :; done # a signal ends a wait too soon
    kill "$beating" 2>/dev/null || true
    wait "$beating" 2>/dev/null || true
    report "$code"
}

report() { # EXIT CODE
    local said artifacts error=
    case $(cat "$folder/stopped" 2>/dev/null) in
        lost) return ;; # somebody else's by now: nothing we say counts
        cancelled) said='"status": "CANCELLED"' ;;
        *)
            log "$folder/log.txt"
            said='"status": "SUCCEEDED", "outputs": {"exitCode": 0}'
            if (($1)); then
                error="{\"code\": \"EXIT_$1\", \"message\": $(in_json "$(tail -n 1 "$folder/log.txt")")}"
            fi
            if ask PUT "$step/artifacts/output.txt?fence=$fence" --data-binary "@$folder/output.txt" \
                --header 'content-type: application/octet-stream' >/dev/null; then
                artifacts='["output.txt"]'
            else
                error='{"code": "UPLOAD_FAILED", "message": "the output could not be uploaded"}' artifacts='[]'
            fi
            [[ -z $error ]] || said="\"status\": \"FAILED\", \"error\": $error"
            said+=", \"artifacts\": $artifacts"
            ;;
    esac
    post "$step/report" "{\"fence\": $fence, \"worker\": \"$worker\", $said}" || true
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
