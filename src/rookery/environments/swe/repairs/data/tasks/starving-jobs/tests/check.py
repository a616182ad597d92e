"""Random days, against the rule itself."""


def order(jobs):
    left = [(arrived, place, name, urgency, length) for place, (arrived, name, urgency, length) in enumerate(jobs)]
    tick, lines = 0, []
    while left:
        ready = [job for job in left if job[0] <= tick]
        if not ready:
            tick = left[0][0]
            continue
        best = min(ready, key=lambda job: (job[3] - (tick - job[0]) // 10, job[1]))
        left.remove(best)
        lines.append(f"{tick} {best[2]}\n")
        tick += best[4]
    return "".join(lines)


def check(g):
    r = g.random
    for _ in range(5):
        tick, jobs = r.randrange(5), []
        gap, longest, urgencies = r.randrange(1, 9), r.choice((3, 12, 25)), r.choice((2, 5, 12))
        for number in range(r.randrange(30, 120)):
            jobs.append(
                (tick, f"j{r.randrange(10**6)}-{number}", r.randrange(urgencies), r.randrange(1, longest + 1))
            )
            tick += r.choice((0, 0, gap, r.randrange(1, 4) * gap, 200 if r.random() < 0.05 else 1))
        text = "".join("%d %s %d %d\n" % job for job in jobs)
        g.case("the order", ["python3", "-m", "desk"], text, out=order(jobs))
