"""Random days of a collector, against the rule: a line belongs to the log that is there when it comes."""

import json
import os


def check(g):
    r = g.random
    here = g.copy()
    g.built(here)
    top = g.folder()

    def line():
        return "".join(r.choices("abcdefgh %s\\", k=r.randrange(1, 40))) + str(r.randrange(10**6))

    def said(orders):
        """The logs after these orders, the newest first."""
        logs, runs, rest = [None], False, ""
        for what, text in orders:
            if what in ("start", "stop"):
                runs = what == "start"
                if rest:
                    logs[0] = (logs[0] or "") + rest + "\n"
                    rest = ""
                logs[0] = (logs[0] or "") if runs else logs[0]
            elif what == "turn" and logs[0] is not None:
                logs = [None, *logs][:4]
            elif what == "say" and text.endswith("\n"):
                logs[0] = (logs[0] or "") + rest + text
                rest = ""
            elif what == "say":
                rest += text
        return {("the log" + (f".{n}" if n else "")): log for n, log in enumerate(logs) if log is not None}

    days = [
        [["start", ""], ["say", line() + "\n"], ["turn", ""], ["say", line() + "\n"], ["stop", ""]],
        [["start", ""], ["say", line() + "\n"], ["stop", ""], ["start", ""], ["say", line() + "\n"], ["stop", ""]],
    ]
    for _ in range(5):
        orders, runs, fresh = [], False, False
        for _ in range(r.randrange(8, 22)):
            what = r.choice(("say", "say", "say", "turn", "turn", "stop"))
            if not runs:
                orders.append([what, ""] if what == "turn" else ["start", ""])
                runs, fresh = what != "turn", False
            elif what == "say":
                orders.append(["say", line() + "\n"])
                fresh = False
            elif what == "turn" and not fresh:
                if r.random() < 0.3:
                    half = line()
                    orders += [["say", half], ["turn", ""], ["say", line() + "\n"]]
                else:
                    orders.append(["turn", ""])
                    fresh = True
            elif what == "stop" and not fresh:
                if r.random() < 0.5:
                    orders.append(["say", line()])
                orders.append(["stop", ""])
                runs = False
        if runs:
            orders += [["say", line() + "\n"], ["stop", ""]]
        days.append(orders)
    with open(os.path.join(os.path.dirname(__file__), "driver.py")) as file:
        driver = file.read()
    asked = [[f"{top}/{number}", orders] for number, orders in enumerate(days)]
    result = g.run(["python3", "-I", "-c", driver], json.dumps(asked), cwd=here)
    g.expect("the logs", json.loads(result.text), [said(orders) for orders in days])
