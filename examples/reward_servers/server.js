// A reward server in plain Node.js over HTTP and JSON: nothing of areal-async, no packages.
//
//   node server.js [port]        (port 0, the default, picks a free one and prints it)
//
// docs/reward-service.md says what a server answers. This one offers one reward, `share_of_ones`.
'use strict';

const http = require('node:http');

const PROTOCOL = 1;
const MAX_BODY_BYTES = 8 << 20;
const TOKEN = process.env.REWARD_TOKEN || ''; // when set, requests must show it

// The reward: the share of the digit 1 in the response. Return a verdict for one input.
function shareOfOnes(input, args) {
  const digit = String(args.digit ?? '1');
  if (typeof input.response !== 'string') return { type: 'abstain', reason: 'no response' };
  const found = input.response.split(digit).length - 1;
  const value = found / Math.max(1, input.response.length);
  return { type: 'score', value, components: { length: input.response.length } };
}

const info = {
  protocol: PROTOCOL,
  server: 'plain-node',
  rewards: [{ name: 'share_of_ones', version: '1', scope: 'episode', wants: [] }],
  limits: { max_inputs: 64, max_body_bytes: MAX_BODY_BYTES, max_in_flight: 8 },
};

// One input's verdict. What throws is an error with its text, never a score of 0.
function judge(input, args) {
  try {
    return shareOfOnes(input, args);
  } catch (error) {
    return { type: 'error', kind: 'exception', message: String(error) };
  }
}

function score(request) {
  if (request.protocol !== PROTOCOL) return refusal(400, 'protocol', `this server speaks ${PROTOCOL}`);
  if (request.reward !== 'share_of_ones') return refusal(404, 'unknown_reward', `no reward ${request.reward}`);
  if (!Array.isArray(request.inputs)) return refusal(400, 'invalid', 'inputs is no list');
  const verdicts = request.inputs.map((input) => judge(input, request.args ?? {}));
  return [200, { request_id: request.request_id, verdicts }];
}

function refusal(status, kind, message) {
  return [status, { error: { kind, message, retry_after_ms: 0 } }];
}

function answer(request, body) {
  const route = `${request.method} ${request.url}`;
  if (route === 'GET /v1/health') return [200, { status: 'ready', in_flight: 0, capacity: 0 }];
  if (TOKEN && request.headers.authorization !== `Bearer ${TOKEN}`) {
    return refusal(401, 'unauthorized', 'a valid token is needed');
  }
  if (route === 'GET /v1/info') return [200, info];
  if (route !== 'POST /v1/score') return refusal(404, 'invalid', `there is no ${route}`);
  try {
    return score(JSON.parse(body));
  } catch (error) {
    return refusal(400, 'invalid', `the body is no JSON: ${error.message}`);
  }
}

const server = http.createServer((request, response) => {
  const chunks = [];
  let size = 0;
  request.on('data', (chunk) => {
    size += chunk.length;
    if (size <= MAX_BODY_BYTES) chunks.push(chunk);
  });
  request.on('end', () => {
    const [status, content] =
      size > MAX_BODY_BYTES
        ? refusal(413, 'too_large', `the body is above ${MAX_BODY_BYTES} bytes`)
        : answer(request, Buffer.concat(chunks).toString('utf8'));
    response.writeHead(status, { 'Content-Type': 'application/json' });
    response.end(JSON.stringify(content));
  });
});

server.listen(Number(process.argv[2] ?? 0), '127.0.0.1', () => {
  console.log(`serves http://127.0.0.1:${server.address().port}`);
});
