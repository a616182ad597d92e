"""Shell script that reduces Git repositories in a sandbox to the history that is reachable from HEAD.

Guarantees:
- Everything that is not reachable from HEAD, the task's commit, is removed: other branches and tags, stashes,
  notes, reflogs, remotes, other worktrees, and their objects, including packed ones. At most `MAX_REPOSITORIES`
  repositories are treated.
- HEAD, the index and the files do not change.
- The script uses the sandbox's own git, without hooks, aliases or helpers of the repository. If the sandbox has no
  git, branches and objects remain, and the script prints `NO_GIT_MARK`.
"""

from typing import Final

MAX_REPOSITORIES: Final = 64

NO_GIT_MARK: Final = "no-git"
"""The script prints this if the sandbox contains Git repositories but no git program."""

STRIP_SCRIPT: Final = r"""
export LC_ALL=C HOME=/nonexistent GIT_CONFIG_NOSYSTEM=1 GIT_TERMINAL_PROMPT=0
most=$1; shift
# A repository has objects, HEAD and refs. A linked worktree has no objects directory.
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
  # Ref names contain neither spaces nor newlines.
  g for-each-ref --format='%(refname)' | while IFS= read -r ref; do
    [ "$ref" = "$branch" ] || printf 'delete %s\n' "$ref"
  done > "$dir/rookery-refs" || exit 1
  git -c safe.directory='*' -c core.hooksPath=/dev/null -c core.bare=true -c core.worktree= --git-dir="$dir" \
    update-ref --no-deref --stdin < "$dir/rookery-refs" || { rm -f "$dir/rookery-refs"; exit 1; }
  rm -f "$dir/rookery-refs"
  g remote 2>/dev/null | while IFS= read -r name; do g config --remove-section "remote.$name" 2>/dev/null; done
  [ -n "$head" ] || { g prune --expire=now; continue; }
  g repack -a -d -q || exit 1
  # After the repack, objects of other repositories are copied and alternates are not needed.
  rm -f "$dir/objects/info/alternates"
  g prune --expire=now || exit 1
  g prune-packed -q
done
}
"""
"""Shell script that runs as the agent's user. Its arguments are the maximum number of repositories, then the
directories to search."""
