// F17: a worker of flows in Node.js 18 or later, without dependencies.
//
//   node worker.mjs [--once]
//
// Counts the words of `inputs.text`, and writes an artifact words.json, a log line, and outputs.
// Environment: PENSTOCK_URL, PENSTOCK_TOKEN, LEASE (seconds).
import { hostname } from 'node:os'

const api = `${process.env.PENSTOCK_URL ?? 'http://127.0.0.1:8080'}/api/v1`
const lease = Number(process.env.LEASE ?? 30)
const worker = `node@${hostname()}:${process.pid}`
const once = process.argv.includes('--once')
const headers = process.env.PENSTOCK_TOKEN ? { authorization: `Bearer ${process.env.PENSTOCK_TOKEN}` } : {}
const stopping = new AbortController()
for (const signal of ['SIGTERM', 'SIGINT']) process.once(signal, () => stopping.abort())

const handlers = { WORD_COUNT: countWords }

async function countWords(step) {
  const text = step.inputs.text
  if (typeof text !== 'string') throw new StepFailed('NO_TEXT', 'inputs.text must be a text', { inputs: step.inputs })
  const counts = {}
  for (const word of text.toLowerCase().match(/\p{L}+/gu) ?? []) {
    step.signal.throwIfAborted()
    counts[word] = (counts[word] ?? 0) + 1
  }
  await step.log(`${Object.keys(counts).length} different words`)
  await step.write('words.json', JSON.stringify(counts, null, 2))
  return { words: Object.values(counts).reduce((sum, count) => sum + count, 0) }
}

class StepFailed extends Error {
  constructor(code, message, details = null) {
    super(message)
    this.error = { code, message, details }
  }
}

async function ask(method, path, body, type = 'application/json') {
  const answer = await fetch(api + path, { method, body, headers: { ...headers, 'content-type': type } })
  if (!answer.ok) throw new Error(`${method} ${path}: ${answer.status} ${await answer.text()}`)
  return answer.json()
}

const post = (path, body) => ask('POST', path, JSON.stringify(body))

async function work(claimed) {
  const { runId, stepId, fence } = claimed
  const path = `/flow_runs/${encodeURIComponent(runId)}/steps/${encodeURIComponent(stepId)}`
  const stopped = new AbortController() // the run was cancelled, or the lease is lost
  const artifacts = []
  const step = {
    ...claimed,
    signal: stopped.signal,
    log: (message, level = 'info') => post(`${path}/logs`, { fence, lines: [{ level, message }] }),
    write: async (name, data) => {
      const quoted = name.split('/').map(encodeURIComponent).join('/')
      await ask('PUT', `${path}/artifacts/${quoted}?fence=${fence}`, data, 'application/octet-stream')
      artifacts.push(name)
    },
  }
  const heartbeat = setInterval(async () => {
    try {
      const { items } = await post('/flow_steps/heartbeat', { items: [{ runId, stepId, fence }], leaseSeconds: lease })
      if (items[0].state !== 'extended') stopped.abort(items[0].state)
    } catch (error) {
      console.error(error.message) // the next heartbeat may succeed
    }
  }, (lease * 1000) / 3)
  let outcome
  try {
    outcome = { status: 'SUCCEEDED', outputs: await handlers[claimed.kind](step) }
  } catch (error) {
    if (stopped.signal.reason === 'lost') return
    if (stopped.signal.aborted) outcome = { status: 'CANCELLED' }
    else outcome = { status: 'FAILED', error: error.error ?? { code: 'WORKER_ERROR', message: String(error) } }
  } finally {
    clearInterval(heartbeat)
  }
  const result = await post(`${path}/report`, { fence, worker, artifacts, ...outcome })
  console.log(`${runId} ${stepId} ${result.result} ${result.status}`)
}

while (!stopping.signal.aborted) {
  const request = { worker, kinds: Object.keys(handlers), leaseSeconds: lease, waitSeconds: 10 }
  try {
    const { items } = await post('/flow_steps/claim', request)
    for (const item of items) await work(item)
    if (once && items.length) break
  } catch (error) {
    console.error(error.message)
    await new Promise((resolve) => setTimeout(resolve, 1000))
  }
}
