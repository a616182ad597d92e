# fills the working directory and the artifacts with symbolic links to files of the grader
for t in /tests /etc/shadow /logs/verifier /logs/verifier/reward.txt /grader /proc/1/root /; do
  for d in . /logs/artifacts; do quiet ln -s $t "$d/link-$(echo $t | tr / _)"; done; done
quiet ln -s /logs/verifier logs; quiet ln /etc/passwd hard; quiet ln -s . loop; mkdir -p a && quiet ln -s ../a a/a
