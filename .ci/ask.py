"""The smoke test's client: waits until a server is ready, then asks it for one streamed chat answer."""

import sys
import time
import urllib.error
import urllib.request

from openai import OpenAI


def wait_until_ready(url: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError) as error:
            if time.monotonic() > deadline:
                sys.exit(f"{url}/ready is not 200 after {seconds:.0f} s: {error}")
        time.sleep(0.2)


def main(url: str) -> None:
    wait_until_ready(url, 120)
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=32,
        stream=True,
    )
    answer = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    print(f"{model} says: {answer}")
    if "Paris" not in answer:
        sys.exit(f"expected Paris in the answer, got {answer!r}")


main(sys.argv[1])
