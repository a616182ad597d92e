"""The history of repositories in a box, cut down to what the task's commit reaches.

Promises:
- what HEAD does not reach is gone: other branches and tags, stashes, notes, reflogs, remotes, other worktrees, and
  the objects behind them, packed ones too;
- HEAD, the index and the files stay as they are;
- it is done by the box's own git, with no hook, alias or helper of the repository's; a box that has none keeps the
  objects, and that is said.
"""

from typing import Final

MOST_REPOSITORIES: Final = 64

NO_GIT: Final = "no-git"
"""Printed where there are repositories and nothing to strip them with."""

STRIP: Final = r"""
export LC_ALL=C HOME=/nonexistent GIT_CONFIG_NOSYSTEM=1 GIT_TERMINAL_PROMPT=0
most=$1; shift
# A folder is a repository where it has these three; a worktree of another one has none of its own objects.
found=$(for top; do [ -d "$top" ] && find "$top" -type d -name objects -prune -print 2>/dev/null; done)
[ -n "$found" ] || exit 0
found=$(printf '%s\n' "$found" | sed 's|/objects$||' | while IFS= read -r one; do
  [ -f "$one/HEAD" ] && [ -d "$one/refs" ] && printf '%s\n' "$one"
done | sort -u | head -n "$most")
[ -n "$found" ] || exit 0
has=; command -v git >/dev/null 2>&1 && has=1
printf '%s\n' "$found" | {
while IFS= read -r dir; do
  g() { git -c safe.directory='*' -c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.bare=true \
    -c core.worktree= -c gc.auto=0 -c maintenance.auto=false --git-dir="$dir" "$@" </dev/null; }
  rm -rf "$dir/logs" "$dir/worktrees" "$dir/rr-cache" "$dir/lost-found" "$dir/refs/stash" "$dir/refs/original" \
    "$dir/refs/remotes" "$dir/refs/notes" "$dir/refs/replace" "$dir/svn" "$dir/branches" "$dir/remotes"
  rm -f "$dir"/*_HEAD "$dir"/BISECT_* "$dir"/*_EDITMSG "$dir"/*_MSG "$dir/gc.log" "$dir/info/refs" \
    "$dir"/objects/pack/*.keep "$dir"/objects/pack/*.bitmap "$dir"/objects/pack/*.rev \
    "$dir"/objects/pack/*.mtimes \
    "$dir"/objects/pack/multi-pack-index* "$dir/objects/info/commit-graph"
  rm -rf "$dir/objects/info/commit-graphs"
  if [ -z "$has" ]; then
    rm -f "$dir/packed-refs.lock"
    echo no-git
    continue
  fi
  head=$(g rev-parse -q --verify 'HEAD^{commit}' 2>/dev/null) || head=
  branch=$(g symbolic-ref -q HEAD 2>/dev/null) || branch=
  # Names of refs hold neither spaces nor newlines.
  g for-each-ref --format='%(refname)' | while IFS= read -r ref; do
    [ "$ref" = "$branch" ] || printf 'delete %s\n' "$ref"
  done > "$dir/rookery-refs" || exit 1
  git -c safe.directory='*' -c core.hooksPath=/dev/null -c core.bare=true -c core.worktree= --git-dir="$dir" \
    update-ref --no-deref --stdin < "$dir/rookery-refs" || { rm -f "$dir/rookery-refs"; exit 1; }
  rm -f "$dir/rookery-refs"
  g remote 2>/dev/null | while IFS= read -r name; do g config --remove-section "remote.$name" 2>/dev/null; done
  [ -n "$head" ] || { g prune --expire=now; continue; }
  g repack -a -d -q || exit 1
  # What was borrowed from another repository is its own now.
  rm -f "$dir/objects/info/alternates"
  g prune --expire=now || exit 1
  g prune-packed -q
done
}
"""
"""As the agent's user: how many repositories at most, then the folders that may hold some."""
