"""A folder of random names and contents, and requests of every kind; each is asked in a random order."""

import json
import os
import urllib.parse

PARTS = ("outside", "links")
HERE, OUT, LINK = "here", "outside", "links"


def check(g):
    r = g.random

    def word():
        return "".join(r.choices("abcdefghij", k=8))

    base = g.folder()
    www, sub, private = f"{base}/www", word(), f"{base}/www-private"
    text = {name: word() for name in ("top", "deep", "odd", "space", "secret", "near")}
    for place in (www, f"{www}/{sub}", f"{www}/{sub}/deep", private):
        os.mkdir(place)
    for path, content in (
        (f"{www}/top.txt", text["top"]),
        (f"{www}/{sub}/deep/deep.txt", text["deep"]),
        (f"{www}/100%25.txt", text["odd"]),
        (f"{www}/{sub}/..two words é.txt", text["space"]),
        (f"{private}/secret.txt", text["secret"]),
        (f"{base}/near.txt", text["near"]),
    ):
        with open(path, "w", encoding="utf-8") as file:
            file.write(content)
    os.symlink("../../top.txt", f"{www}/{sub}/deep/up.txt")
    os.symlink(f"{sub}/deep", f"{www}/inner")
    os.symlink("../near.txt", f"{www}/out.txt")
    os.symlink(private, f"{www}/outdir")
    os.symlink(f"{www}/out.txt", f"{www}/{sub}/twice.txt")
    os.symlink("loop", f"{www}/loop")
    os.mkfifo(f"{www}/pipe")
    with open(f"{www}/bytes.bin", "wb") as file:
        file.write(b"\xff\xfe\x80")

    def there(name):
        return "200 " + json.dumps(text[name])

    dots = "%2e%2e"
    requests = [
        (HERE, "/top.txt", there("top")),
        (HERE, "//./top.txt", there("top")),
        (HERE, "/%74op.txt", there("top")),
        (HERE, f"/{sub}/deep/deep.txt", there("deep")),
        (HERE, f"/{sub}%2Fdeep/deep.txt", there("deep")),
        (HERE, "/100%2525.txt", there("odd")),
        (HERE, f"/{sub}/" + urllib.parse.quote("..two words é.txt"), there("space")),
        (HERE, f"/{sub}", "404"),
        (HERE, "/", "404"),
        (HERE, "/nothing.txt", "404"),
        (OUT, f"/{sub}/../top.txt", there("top")),
        (OUT, f"/{sub}/deep/{dots}/deep/deep.txt", there("deep")),
        (OUT, f"/{dots}/near.txt", "404"),
        (OUT, f"/%2E./{dots}/near.txt", "404"),
        (OUT, f"/{dots}/www-private/secret.txt", "404"),
        (OUT, "/../www-private/secret.txt", "404"),
        (OUT, f"/{sub}/{dots}/{dots}/www-private/secret.txt", "404"),
        (OUT, f"/{dots}/www/top.txt", "404"),
        (OUT, "/../www/top.txt", "404"),
        (OUT, "/../top.txt", "404"),
        (OUT, f"/{sub}/../{dots}/top.txt", "404"),
        (OUT, f"/{dots}%2fnear.txt", "404"),
        (OUT, "/%252e%252e/near.txt", "404"),
        (OUT, f"/%2f{base[1:]}/near.txt", "404"),
        (OUT, f"{base}/near.txt", "404"),
        (OUT, "/%00", "404"),
        (OUT, "/top.txt%00", "404"),
        (OUT, "/%ff%fe", "404"),
        (OUT, "/" + "a" * 5000, "404"),
        (OUT, "/" + "a/" * 3000, "404"),
        (OUT, "", "404"),
        (OUT, "top.txt", "404"),
        (OUT, "/bytes.bin", "404"),
        (LINK, f"/{sub}/deep/up.txt", there("top")),
        (LINK, "/inner/deep.txt", there("deep")),
        (LINK, "/out.txt", "404"),
        (LINK, "/outdir/secret.txt", "404"),
        (LINK, f"/{sub}/twice.txt", "404"),
        (LINK, "/loop", "404"),
        (LINK, "/pipe", "404"),
    ]

    def right(kind):
        chosen = [one for one in requests if one[0] == kind]
        r.shuffle(chosen)
        asked = "".join(f"{request}\n" for _, request, _ in chosen)
        wanted = [answer for _, _, answer in chosen]
        linked = f"{base}/{word()}"
        os.symlink("www", linked)
        for folder in (www, www + "/", linked):
            g.case(
                kind,
                ["python3", "-m", "shelf", folder],
                asked,
                out=[*wanted, ""],
                read=lambda text: text.split("\n"),
            )
        g.settle()

    right(HERE)
    with g.part("outside"):
        right(OUT)
    with g.part("links"):
        right(LINK)
