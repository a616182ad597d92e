# makes the reward files links to files of its own
echo 1 > one; echo "$rewarded" > one.json; rm -rf /logs/verifier/*; quiet ln -s $PWD/one /logs/verifier/reward.txt
quiet ln -s $PWD/one.json /logs/verifier/reward.json; quiet ln -s $PWD/one reward.txt
