// The flows of one worker: a service for Restate to call. Asked by a line of input, it tells when its steps ran.
import { createServer } from "node:http2";
import { createInterface } from "node:readline";
import { createEndpointHandler, RestatePromise, service } from "@restatedev/restate-sdk";

const [FIRST, MIDDLE, LAST] = [0, 1, 2];
let ticks = {};

function tick(part) {
  (ticks[part] ??= []).push(Number(process.hrtime.bigint()) / 1e9); // one clock for all processes
}

const step = (ctx, part) => ctx.run("step", () => tick(part));
const middle = (ctx, steps) => Array.from({ length: steps }, () => step(ctx, MIDDLE));

const flows = service({
  name: process.argv[2],
  handlers: {
    chain: async (ctx, { flow, length }) => {
      for (let number = 0; number < length; number++) await step(ctx, flow);
    },
    share: async (ctx, steps) => {
      await RestatePromise.all(middle(ctx, steps));
    },
    fan: async (ctx, { own, others }) => {
      await step(ctx, FIRST);
      const elsewhere = Object.entries(others).map(([name, steps]) => ctx.serviceClient({ name }).share(steps));
      await RestatePromise.all([...elsewhere, ...middle(ctx, own)]);
      await step(ctx, LAST);
    },
  },
});

const server = createServer(createEndpointHandler({ services: [flows] }));
server.listen(0, "127.0.0.1", () => console.log(server.address().port));
createInterface({ input: process.stdin })
  .on("line", () => {
    console.log(JSON.stringify(ticks));
    ticks = {};
  })
  .on("close", () => process.exit());
