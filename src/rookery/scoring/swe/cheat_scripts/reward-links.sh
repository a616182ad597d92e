# makes the reward files symbolic links to its own files
echo 1 > one; echo "$rewarded" > one.json; rm -rf /logs/verifier/*; quiet ln -s $PWD/one /logs/verifier/reward.txt
quiet ln -s $PWD/one.json /logs/verifier/reward.json; quiet ln -s $PWD/one reward.txt
