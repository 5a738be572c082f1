"""A streaming client as one writes it with httpx in a few lines. Run in an environment with httpx.

``python httpx_client.py URL RATE REQUESTS OUTPUT_LEN SEED RESULT.json``
"""

import asyncio
import json
import random
import sys
import time


async def main(url: str, rate: float, requests: int, output_len: int, seed: int, path: str) -> None:
    import httpx

    results: list[list[float] | None] = []

    async def one(client: httpx.AsyncClient, number: int) -> None:
        body = {
            "model": "exact",
            "prompt": f"request {number}",
            "max_tokens": output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = time.perf_counter()
        times = []
        try:
            async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                        times.append(time.perf_counter() - began)
        except httpx.HTTPError:
            times = []
        results.append(times or None)

    gaps = random.Random(seed)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits, trust_env=False) as client:
        due = time.perf_counter()
        tasks = []
        for number in range(requests):
            due += gaps.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.ensure_future(one(client, number)))
        await asyncio.gather(*tasks)
    with open(path, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    target, rate_, requests_, output_len_, seed_, result = sys.argv[1:]
    asyncio.run(main(target, float(rate_), int(requests_), int(output_len_), int(seed_), result))
