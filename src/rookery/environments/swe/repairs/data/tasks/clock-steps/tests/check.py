"""Random traffic on clocks that disagree, against the rule itself."""


def answers(burst, rate, requests):
    held, seen, lines = {}, {}, []
    for at, client, cost in requests:
        last = seen.get(client, at)
        now = seen[client] = max(at, last)
        tokens = min(burst * 1000, held.get(client, burst * 1000) + (now - last) * rate)
        passes = tokens >= cost * 1000
        held[client] = tokens - cost * 1000 * passes
        lines.append("yes\n" if passes else "no\n")
    return "".join(lines)


def check(g):
    r = g.random
    for _ in range(5):
        burst, rate = r.randrange(1, 12), r.randrange(1, 9)
        at, requests = r.randrange(10**7), []
        clients = [f"c{number}" for number in range(r.randrange(1, 5))]
        for _ in range(r.randrange(60, 240)):
            at = max(
                0, at + r.choice((0, 1, 37, 250, 900, 2500)) * (1 if r.random() < 0.8 else -r.choice((1, 3, 40)))
            )
            requests.append((at, r.choice(clients), r.choice((1, 1, 1, 2, burst, burst + 1))))
        text = "".join("%d %s %d\n" % request for request in requests)
        words = ["python3", "-m", "gate", "--burst", str(burst), "--rate", str(rate)]
        g.case("yes or no", words, text, out=answers(burst, rate, requests))
