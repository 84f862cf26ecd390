// SPDX-License-Identifier: Apache-2.0
// Expert parallelism in one process, as examples/c/local4.c: the ranks are goroutines, 1, 2 (the default), 4 or 8.
//
//	examples/go/build.sh /tmp/out && /tmp/out/local_go [ranks]
package main

import (
	"fmt"
	"math"
	"os"
	"strconv"

	"sluice"
)

const (
	tokens = 192 // of all ranks together, so that losses do not depend on the number of ranks
	M      = 16
	H      = 32
	E      = 8
	K      = 2
	steps  = 40
)

// noise returns a number in [-1, 1) that depends only on the arguments, not on the rank.
func noise(kind, i uint32) float32 {
	h := kind*0x9e3779b9 + i*0x85ebca6b
	h ^= h >> 16
	h *= 0x7feb352d
	h ^= h >> 15
	h *= 0x846ca68b
	h ^= h >> 16
	return float32(h>>8)/8388608 - 1
}

func floats(rows, columns int) ([]float32, *sluice.Tensor) {
	data := sluice.Slice[float32](rows * columns)
	return data, sluice.NewTensor(data, sluice.TYPE_FLOAT, int64(rows), int64(columns))
}

// experts returns memory for a matrix of each expert of a rank, and its tensors.
func experts(count, rows, columns int) ([]float32, *sluice.Tensor) {
	data := sluice.Slice[float32](count * rows * columns)
	tensors := sluice.Slice[sluice.Tensor](count)
	for e := range tensors {
		part := data[e*rows*columns : (e+1)*rows*columns]
		tensors[e] = *sluice.NewTensor(part, sluice.TYPE_FLOAT, int64(rows), int64(columns))
	}
	return data, &tensors[0]
}

// train returns this rank's part of each step's loss, which is the sum over the ranks. It never frees memory of C.
func train(comm *sluice.Comm) ([]float64, error) {
	rank, ranks := int(sluice.CommRank(comm)), int(sluice.CommWorldSize(comm))
	var context *sluice.Context
	if err := sluice.ContextCreate(sluice.New[sluice.ContextConfig](), comm, &context); err != nil {
		return nil, err
	}
	defer sluice.ContextDestroy(context)
	config := sluice.New[sluice.MoeConfig]()
	config.ModelWidth, config.HiddenWidth, config.NumExperts, config.TopK = M, H, E, K
	config.NumChunks = 2 // one half is sent while the other is computed
	var moe *sluice.Moe
	if err := sluice.MoeCreate(context, config, &moe); err != nil {
		return nil, err
	}
	defer sluice.MoeDestroy(moe)

	begin, local := tokens*rank/ranks, int(sluice.MoeNumLocalExperts(moe))
	T := tokens*(rank+1)/ranks - begin
	x, tx := floats(T, M)
	y, ty := floats(T, M)
	gradY, tGradY := floats(T, M)
	weights, tWeights := floats(T, K)
	ids := sluice.Slice[int32](T * K)
	tIds := sluice.NewTensor(ids, sluice.TYPE_INT, int64(T), K)
	target := make([]float64, T*M)
	for i := range x {
		x[i] = noise(1, uint32(begin*M+i))
	}
	for i := range target {
		target[i] = math.Sin(3 * float64(x[i/M*M+(i+1)%M]))
	}
	for i := range ids { // a fixed router, by the signs of coordinates of x
		for bit := 0; bit < 2; bit++ {
			if x[i/K*M+bit] > 0 {
				ids[i] += 1 << bit
			}
		}
		ids[i] = (ids[i] + 4*int32(i%K)) % E
		weights[i] = 0.5
	}
	w1, tw1 := experts(local, H, M)
	w2, tw2 := experts(local, M, H)
	grad1, tGrad1 := experts(local, H, M)
	grad2, tGrad2 := experts(local, M, H)
	for i := range w1 {
		at := uint32(rank*len(w1) + i)
		w1[i], w2[i] = 0.4*noise(2, at), 0.3*noise(3, at)
	}
	params, grads := sluice.New[sluice.ExpertTensors](), sluice.New[sluice.ExpertTensors]()
	params.W1, params.W2, grads.W1, grads.W2 = tw1, tw2, tGrad1, tGrad2

	losses := make([]float64, steps)
	for step := range losses {
		forward := sluice.New[sluice.MoeForwardArgs]()
		forward.Tokens, forward.ExpertIds, forward.RouteWeights = tx, tIds, tWeights
		forward.Params, forward.OutTokens, forward.NeedsBackward = params, ty, 1
		var saved *sluice.Step
		if err := sluice.MoeForward(moe, forward, nil, &saved); err != nil {
			return nil, err
		}
		for i := range y {
			difference := float64(y[i]) - target[i]
			losses[step] += difference * difference / (tokens * M)
			gradY[i] = float32(2 * difference / (tokens * M))
		}
		backward := sluice.New[sluice.MoeBackwardArgs]()
		backward.Tokens, backward.RouteWeights, backward.Params = tx, tWeights, params
		backward.GradOut, backward.GradParams = tGradY, grads
		err := sluice.MoeBackward(moe, saved, backward, nil)
		sluice.StepDrop(saved)
		sluice.Free(forward)
		sluice.Free(backward)
		if err != nil {
			return nil, err
		}
		for i := range w1 { // an expert's gradient is a sum over the tokens of all ranks
			w1[i] -= 1.5 * grad1[i]
			w2[i] -= 1.5 * grad2[i]
		}
	}
	return losses, nil
}

type result struct {
	losses []float64
	err    error
}

func rankMain(group *sluice.LocalGroup, rank, ranks int, done chan<- result) {
	config := sluice.New[sluice.CommConfig]()
	config.Rank, config.WorldSize = int32(rank), int32(ranks)
	var comm *sluice.Comm
	if err := sluice.CommCreateLocal(group, config, &comm); err != nil {
		done <- result{nil, err}
		return
	}
	defer sluice.CommDestroy(comm)
	losses, err := train(comm)
	done <- result{losses, err}
}

func run(ranks int) error {
	var group *sluice.LocalGroup
	if err := sluice.LocalGroupCreate(int32(ranks), &group); err != nil {
		return err
	}
	defer sluice.LocalGroupDestroy(group)
	done := make(chan result)
	for rank := 0; rank < ranks; rank++ {
		go rankMain(group, rank, ranks, done)
	}
	losses := make([]float64, steps)
	for rank := 0; rank < ranks; rank++ {
		mine := <-done
		if mine.err != nil {
			return mine.err
		}
		for step, loss := range mine.losses {
			losses[step] += loss
		}
	}
	for step, loss := range losses {
		if step%10 == 0 || step == steps-1 {
			fmt.Printf("step %2d loss %.6f (%d ranks)\n", step, loss, ranks)
		}
	}
	return nil
}

func main() {
	ranks := 2
	if len(os.Args) > 1 {
		ranks, _ = strconv.Atoi(os.Args[1])
	}
	if err := run(ranks); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
